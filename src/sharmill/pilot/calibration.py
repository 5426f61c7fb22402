"""The result of a pilot, as stored in ``calibration.json`` of a run directory."""

import msgspec

from sharmill.pilot.advice import Advice
from sharmill.rates import StageRate


class RejectShare(msgspec.Struct, frozen=True, kw_only=True):
    """Records that a run would reject for one reason.

    Attributes:
        stage, reason: the stage and the reason code.
        count: number of records in the pilot.
        share: estimated share of all records.
        example: the detail of one of these rejects.
    """

    stage: str
    reason: str
    count: int
    share: float
    example: str


class AudioFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The number of files with the same format, sampling rate and number of channels."""

    format: str
    sampling_rate: int
    channels: int
    count: int


class SimilarityCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Histograms of the similarities of pairs of utterances, in bins of equal width from -1 to 1."""

    within_groups: list[int]
    across_groups: list[int]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a pilot, as stored in ``calibration.json`` of the run directory.

    Attributes:
        name: the name of the dataset.
        seed: the seed of the sample.
        encoder, device: the speaker encoder, None for a dataset without contexts, and its device.
        num_records: number of records in the whole input.
        num_drawn, num_groups: number of records in the pilot, and number of their speaker groups.
        num_partial_groups: number of groups that were too large to be drawn as a whole. If there are any, yields and
            wrong shares are lower bounds, because a whole group has more candidates.
        rejects: the rejected records by reason.
        formats: the formats of the audio files.
        durations: quantiles of the durations, in seconds, of the utterances that passed the checks; the keys are the
            quantile levels.
        too_short_for_context: of the utterances that passed the checks, the share with a duration outside the range
            from ``match.min_duration`` to ``match.max_duration``.
        advice, similarities: the advice and the histograms of similarities; None for a dataset without contexts.
        near_copies: number of utterances whose context would have the same text, the same length and nearly the same
            sound, and is therefore probably a lossy or quieter copy.
        max_similarity: a value for ``match.max_similarity`` that excludes these copies; None if there are none.
        audio_seconds: seconds of audio that were decoded and embedded.
        rates: the rates of the stages on one rank of this machine; empty if no records were left to measure them.
    """

    name: str
    seed: int
    encoder: str | None
    device: str
    num_records: int
    num_drawn: int
    num_groups: int
    num_partial_groups: int
    rejects: list[RejectShare]
    formats: list[AudioFormat]
    durations: dict[str, float]
    too_short_for_context: float
    advice: Advice | None
    similarities: SimilarityCounts | None
    audio_seconds: float
    rates: list[StageRate]
    near_copies: int = 0
    max_similarity: float | None = None
