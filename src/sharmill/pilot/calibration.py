"""The outcome of a pilot, as ``calibration.json`` of a run directory has it."""

import msgspec

from sharmill.pilot.advice import Advice
from sharmill.rates import StageRate


class RejectShare(msgspec.Struct, frozen=True, kw_only=True):
    """Records that a run would reject: the reason, how many of the pilot, the share of all, and one sentence of one."""

    stage: str
    reason: str
    count: int
    share: float
    example: str


class AudioFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a format, by sampling rate and channels."""

    format: str
    sampling_rate: int
    channels: int
    count: int


class SimilarityCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts in bins of equal width from -1 to 1: pairs of utterances by their similarity."""

    within_groups: list[int]
    across_groups: list[int]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a pilot, as ``calibration.json`` of the run directory has it.

    Attributes:
        num_records: of the whole input; of the pilot are ``num_drawn``, of ``num_groups`` groups.
        num_partial_groups: groups too large to be taken whole. Yields and wrong shares are lower bounds then, since
            in the whole group there is more to choose from.
        durations: seconds of the utterances that passed the checks, at the shares that are the keys.
        too_short_for_context: share of them that is outside ``match.min_duration`` and ``max_duration``.
        advice, similarities: None for a dataset without contexts.
        near_copies: utterances whose context would be a recording of their text that is as long, and similar like a
            copy of theirs that is stored with loss or quieter.
        max_similarity: keeps these copies out; None where there is none.
        audio_seconds: that was decoded and embedded.
        rates: of the stages on one rank of this machine; empty where nothing was left to measure them on.
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
