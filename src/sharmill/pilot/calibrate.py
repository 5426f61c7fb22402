"""The pilot: draw whole speaker groups, check, decode and embed them, and say what a run over all of it would do."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sharmill.config import Config
from sharmill.config.references import References
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, RejectRecord
from sharmill.files.storage import PROBE, disk_errors, remove_asides, require_writable, write_atomic
from sharmill.manifest import Utterance
from sharmill.match.candidates import segment_roots
from sharmill.match.choose import ContextChooser, encoder_family
from sharmill.match.config import MatchConfig
from sharmill.match.embed import EmbeddedSegment, Embedder
from sharmill.match.stage import MatchStage
from sharmill.models.device import check_device
from sharmill.pilot.advice import Advice, advise
from sharmill.pilot.rates import StageRate
from sharmill.pilot.records import PilotRecords, read_pilot
from sharmill.pilot.small_run import run_small
from sharmill.pilot.voices import Voices
from sharmill.prepare.speaker_key import make_speaker_key
from sharmill.prepare.stage import PrepareStage
from sharmill.speaker_tag import tagged_speaker

_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_BINS = 50
# A manifest is there twice: in the parts of units, and merged.
_COPIES = 2


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


def run_pilot(
    config: Config, *, size: int = 1000, seed: int = 0, max_wrong: float = 0.01, device: str = "cpu",
    measure: bool = True, tell: Callable[[str], None] = lambda line: None,
) -> tuple[Path, Calibration]:  # fmt: skip
    """Run a pilot over a sample of a configuration's input.

    Args:
        size: records to draw.
        max_wrong: the share of contexts that may be of another speaker.
        device: ``cpu`` or ``cuda``.
        measure: also measure rates, which needs the codecs.
        tell: called with a line before each step.

    Returns:
        The file in the run directory that has the outcome, and the outcome.

    Raises:
        ConfigError: the configuration cannot be used, or the input has no records.
    """
    path = RunDir(Path(config.run_dir)).calibration
    with disk_errors(path.parent):
        require_writable(path.parent)
        remove_asides(path.parent, {path.name, PROBE})
    tell("reading the speaker groups of all records")
    records = read_pilot(config, size, seed)
    if not records.num_records:
        raise ConfigError("the sources have no records", code="bad_manifest")
    advice, similarities = None, None
    embedded: dict[int, EmbeddedSegment] = {}
    rates = [_rate_of_prepare(records)]
    lost: dict[int, tuple[str, RejectRecord]] = {}
    lost |= {place: (PrepareStage.kind, why) for place, why in records.rejects.items()}
    if (match := config.find(MatchConfig)) is not None:
        tell(f"embedding {len(records.utterances)} utterances of {records.sample.num_groups} groups")
        kind, started = check_device(device), time.monotonic()
        embed = MatchStage(config).make_embedder(device)
        loaded = time.monotonic()
        embedded = _embed(embed, records.utterances, lost)
        rates.append(_rate_of_match(records, kind, loaded - started, time.monotonic() - loaded))
        tell("comparing voices")
        voices = _choose(config, match, records, embedded, lost)
        advice, similarities = advise(voices, max_wrong), _count_similarities(voices)
    formats = [
        AudioFormat(format=name, sampling_rate=rate, channels=channels, count=count)
        for (name, rate, channels), count in records.formats.most_common()
    ]
    # Names as they were written, without values of the environment.
    hide_at = config.references.hide_at
    outcome = Calibration(
        name=hide_at(("name",), config.name), seed=seed, device=device,
        encoder=None if match is None else hide_at((MatchStage.kind, "encoder"), match.encoder),
        num_records=records.num_records, num_drawn=len(records.sample.rows),
        num_groups=records.sample.num_groups, num_partial_groups=records.sample.num_partial,
        rejects=_share_rejects(records, lost, config.references), formats=formats,
        advice=advice, similarities=similarities,
        audio_seconds=sum(one.duration for one in records.utterances if one.index in embedded),
        rates=[], **_durations(config, records),
    )  # fmt: skip
    # Written before the rates are measured: an error of a later stage does not lose the advice.
    _store(path, outcome)
    if measure:
        tell("writing, encoding and checking a dataset of them, for the rates")
        rates += run_small(config, records.utterances, len(records.sample.rows))
        outcome = msgspec.structs.replace(outcome, rates=rates)
        _store(path, outcome)
    return path, outcome


def _store(path: Path, outcome: Calibration) -> None:
    with disk_errors(path.parent):
        write_atomic(path, msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n")


def _rate_of_prepare(records: PilotRecords) -> StageRate:
    drawn = max(1, len(records.sample.rows))
    size = sum(len(utterance.to_json()) + 1 for utterance in records.utterances)
    return StageRate(
        name=PrepareStage.kind, device="", seconds_to_start=0.0, cost_per_record=1, records_per_record=1,
        seconds_per_cost=records.seconds_to_read / records.num_records + records.seconds_to_check / drawn,
        bytes_per_cost=_COPIES * size / drawn, records_per_unit=drawn,
    )  # fmt: skip


def _rate_of_match(records: PilotRecords, kind: str, seconds_to_start: float, seconds: float) -> StageRate:
    drawn, kept = len(records.sample.rows), len(records.utterances)
    audio = max(1e-9, sum(utterance.duration for utterance in records.utterances))
    size = sum(len(utterance.to_json()) + 1 for utterance in records.utterances)
    return StageRate(
        name=MatchStage.kind, device=kind, seconds_to_start=seconds_to_start, seconds_per_cost=seconds / audio,
        bytes_per_cost=_COPIES * size / audio, cost_per_record=audio / drawn,
        records_per_record=kept / drawn, records_per_unit=kept,
    )  # fmt: skip


def _embed(
    embed: Embedder, utterances: list[Utterance], lost: dict[int, tuple[str, RejectRecord]]
) -> dict[int, EmbeddedSegment]:
    """Return the voices of utterances by their places; those that cannot be decoded are added to ``lost``."""
    embedded = {}
    segments = [utterance.segment for utterance in utterances]
    with embed.reader.gather(segments):
        outcomes = embed(segments)
    for utterance, outcome in zip(utterances, outcomes, strict=True):
        if isinstance(outcome, RejectRecord):
            lost[utterance.index] = MatchStage.kind, outcome
        else:
            embedded[utterance.index] = outcome
    return embedded


def _choose(
    config: Config,
    match: MatchConfig,
    records: PilotRecords,
    embedded: dict[int, EmbeddedSegment],
    lost: dict[int, tuple[str, RejectRecord]],
) -> Voices:
    """Return the voices with their best contexts; utterances that have none for another reason go to ``lost``."""
    group_key = make_speaker_key(config.speaker_key)

    def key(utterance: Utterance) -> str:
        return group_key(utterance.audio_filepath, tagged_speaker(utterance.speaker))

    # Whatever the threshold is, the context is the best that the other limits allow.
    free = dataclasses.replace(
        match, min_similarity=-1.0, choice="best", contexts="choose", contexts_from_dataset=False
    )
    chooser = ContextChooser(free, segment_roots(config), key)
    utterances = sorted((one for one in records.utterances if one.index in embedded), key=key)
    best = []
    for _, members in groupby(utterances, key=key):
        group = list(members)
        for utterance, outcome in zip(
            group, chooser.choose(group, [embedded[one.index] for one in group]), strict=True
        ):
            if isinstance(outcome, RejectRecord):
                lost[utterance.index] = MatchStage.kind, outcome
                best.append(-np.inf)
            else:
                assert outcome.context is not None
                utterance.context = outcome.context
                best.append(outcome.context.similarity)
    rows = [np.asarray(embedded[one.index].embedding, dtype=np.float64) for one in utterances]
    stacked = np.stack(rows) if rows else np.empty((0, 1))
    lengths = np.linalg.norm(stacked, axis=1, keepdims=True)
    return Voices(
        embeddings=np.divide(stacked, lengths, out=np.zeros_like(stacked), where=lengths > 0),
        groups=_number(map(key, utterances)),
        speakers=_number(tagged_speaker(one.speaker) for one in utterances),
        candidates=np.array([chooser.long_enough(one.duration) for one in utterances], dtype=bool),
        best=np.array(best, dtype=np.float64),
        weights=records.sample.weights[[one.index for one in utterances]],
        reference=encoder_family(match).strangers,
    )


def _number(names: Iterable[str]) -> np.ndarray:
    return np.unique(np.array([*names], dtype=object).astype(str), return_inverse=True)[1].reshape(-1)


def _count_similarities(voices: Voices) -> SimilarityCounts:
    def count(pairs: np.ndarray) -> list[int]:
        counts, _ = np.histogram(voices.similarities[np.triu(pairs | pairs.T, 1)], bins=_BINS, range=(-1, 1))
        return [int(number) for number in counts]

    return SimilarityCounts(within_groups=count(voices.is_within), across_groups=count(voices.is_across))


def _share_rejects(
    records: PilotRecords, lost: dict[int, tuple[str, RejectRecord]], references: References
) -> list[RejectShare]:
    counts = Counter((stage, why.reason) for stage, why in lost.values())
    found = []
    for (stage, reason), count in counts.most_common():
        places = [place for place, (at, why) in lost.items() if (at, why.reason) == (stage, reason)]
        share = float(records.sample.weights[places].sum())
        example = references.hide(lost[min(places)][1].detail)
        found.append(RejectShare(stage=stage, reason=reason, count=count, share=share, example=example))
    return found


def _durations(config: Config, records: PilotRecords) -> dict[str, Any]:
    seconds = np.array([one.duration for one in records.utterances])
    if not len(seconds):
        return {"durations": {}, "too_short_for_context": 0.0}
    quantiles = np.quantile(seconds, _QUANTILES)
    short = 0.0
    if (match := config.find(MatchConfig)) is not None:
        short = float(((seconds < match.min_duration) | (seconds > (match.max_duration or np.inf))).mean())
    durations = {f"{share:g}": round(float(value), 3) for share, value in zip(_QUANTILES, quantiles, strict=True)}
    return {"durations": durations, "too_short_for_context": short}
