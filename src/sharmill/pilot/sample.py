"""The pilot: draw whole speaker groups, check, decode and embed them, and predict the outcome of a full run.

To measure the rates of the stages after match, a small dataset is made from the drawn records: it is written, encoded
and validated.
"""

import math
import os
import shutil
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sharmill.audio.files import open_recording
from sharmill.audio.segments import SegmentReader
from sharmill.config import Config, MetricsConfig, References
from sharmill.engine.delays import take_delays
from sharmill.engine.executor import Listener
from sharmill.engine.order import make_stages
from sharmill.engine.run import locked, run_stage
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import RunOptions
from sharmill.errors import RejectRecord, refuse
from sharmill.executors.local import LocalExecutor
from sharmill.files.atomic import remove_temp_files, require_writable, write_atomic
from sharmill.files.checksums import hash_text
from sharmill.files.disk import PUT_BACK, disk_errors
from sharmill.manifest import Context, Utterance, tagged_speaker
from sharmill.match.choose import ContextChooser, encoder_family, min_similarity
from sharmill.match.config import MatchConfig
from sharmill.match.embed import EmbeddedSegment
from sharmill.match.stage import MatchStage, facts_of, make_embedder
from sharmill.models.device import check_device
from sharmill.pilot.advice import Voices, advise
from sharmill.pilot.calibration import AudioFormat, Calibration, RejectShare, SimilarityCounts
from sharmill.prepare.check import PrepareConfig, RecordCheck, parse_record
from sharmill.prepare.stage import PrepareStage, make_check, pieces_of
from sharmill.rates import StageRate, measure_rates
from sharmill.sources import DescribedRecord, Piece, RawRecord
from sharmill.stages.inputs import segment_roots
from sharmill.stages.lines import leave_manifest
from sharmill.stages.speaker_key import is_doubtful, make_speaker_key
from sharmill.validate.stage import ValidateConfig

_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Sample:
    """A random sample of the records.

    Attributes:
        rows: (M,) int64, the numbers of the records, in increasing order.
        weights: (M,) float64 with sum 1, the share of all records for which each record stands.
        num_groups: number of speaker groups in the sample.
        num_partial: number of groups from which only a part was drawn.
    """

    rows: np.ndarray
    weights: np.ndarray
    num_groups: int
    num_partial: int


def draw_groups(groups: np.ndarray, size: int, seed: int) -> Sample:
    """Draw records at random, and take their whole groups, until there are ``size`` records.

    The probability of drawing a group is proportional to its size, and each draw has the same weight. A weighted mean
    over the sample is therefore unbiased, whatever the sizes of the groups are (M. H. Hansen and W. N. Hurwitz, "On the
    Theory of Sampling from Finite Populations", 1943). From a group with more than max(100, ``size`` // number of
    groups) records, only that many random records are taken.

    Args:
        groups: (N,) int64, the number of each record's group, from 0.
        size: number of records wanted. The sample is smaller if there are fewer records, and may be larger because of
            its last group.

    >>> draw_groups(np.array([0, 0, 1, 1, 1]), 100, seed=1).rows.tolist()
    [0, 1, 2, 3, 4]
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    sizes = np.bincount(groups)
    # The largest number of records that are taken from one group.
    most = max(100, size // max(1, len(sizes)))
    drawn = groups[generator.permutation(len(groups))]
    names, first = np.unique(drawn, return_index=True)
    names = names[np.argsort(first)]  # in the order in which they were drawn
    reached = np.cumsum(np.minimum(sizes[names], most))
    taken = names[: int(np.searchsorted(reached, size)) + 1]
    # If the sample contains all groups, count all draws, so that each group has its exact share.
    last = len(drawn) if len(taken) == len(names) else int(np.sort(first)[len(taken) - 1]) + 1
    hits = np.bincount(drawn[:last], minlength=len(sizes))
    is_taken = np.isin(groups, taken)
    large = np.sort(taken[sizes[taken] > most]).tolist()
    for group in large:
        is_taken[generator.permutation(np.flatnonzero(groups == group))[most:]] = False
    rows = np.flatnonzero(is_taken)
    weights = (hits / np.minimum(sizes, most))[groups[rows]]
    return Sample(rows=rows, weights=weights / weights.sum(), num_groups=len(taken), num_partial=len(large))


@dataclass
class PilotRecords:
    """A checked sample of the input.

    Attributes:
        num_records: number of records in the whole input.
        sample: the records that were drawn.
        utterances: the records that passed the checks; ``index`` is the position in the sample.
        rejects: the reason for the rejection of each other record, by position in the sample.
        formats: number of files by format, sampling rate and channels.
        seconds_per_record: time to read and check one record, in seconds.
    """

    num_records: int
    sample: Sample
    utterances: list[Utterance] = field(default_factory=list)
    rejects: dict[int, RejectRecord] = field(default_factory=dict)
    formats: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    seconds_per_record: float = 0.0


def read_pilot(config: Config, size: int, seed: int) -> PilotRecords:
    """Draw whole speaker groups from the sources until there are ``size`` records, and check these records.

    Raises:
        ConfigError: a source cannot be used.
    """
    check = make_check(config)
    check.roots.check()
    pieces = list(pieces_of(config))
    started = time.monotonic()
    groups = _read_groups(config, check, pieces)
    found = PilotRecords(len(groups), draw_groups(groups, size, seed))
    read = time.monotonic()
    for place, (number, raw) in enumerate(_read_rows(config, pieces, found.sample.rows.tolist())):
        try:
            record, member = _decode(raw)
            utterance = check(record, number, member)
            utterance.index = place
            segment = utterance.segment
            with open_recording(check.roots.locate(segment), segment.member, segment.audio_filepath) as recording:
                info = recording.info
            found.formats[info.format, info.sampling_rate, info.channels] += 1
        except RejectRecord as reject:
            found.rejects[place] = reject
        else:
            found.utterances.append(utterance)
    found.seconds_per_record = (
        (read - started) / max(1, len(groups)) + (time.monotonic() - read) / max(1, len(found.sample.rows))
    )  # fmt: skip
    return found


def _read_groups(config: Config, check: RecordCheck, pieces: list[tuple[int, Piece]]) -> np.ndarray:
    """Return the number of each record's speaker group, (N,)."""
    hashes = array("Q")
    for number, piece in pieces:
        for raw in config.sources[number].read(piece.params):
            try:
                record, member = _decode(raw)
                key = check.group(record, number, member)
            except RejectRecord:
                key = f"\0{len(hashes)}"  # a record without a group forms its own group
            hashes.append(hash_text(key))
    return np.unique(np.frombuffer(hashes, np.uint64), return_inverse=True)[1].astype(np.int64)


def _read_rows(config: Config, pieces: list[tuple[int, Piece]], rows: list[int]) -> Iterator[tuple[int, RawRecord]]:
    """Yield the source number and the raw record of each row, in increasing order; other pieces are not read."""
    wanted, begin = set(rows), 0
    for number, piece in pieces:
        here = wanted.intersection(range(begin, begin + piece.num_records))
        for position, raw in enumerate(config.sources[number].read(piece.params), begin) if here else ():
            if position in here:
                yield number, raw
        begin += piece.num_records


def _decode(raw: RawRecord) -> tuple[dict[str, Any], Any]:
    return parse_record(raw), raw.member if isinstance(raw, DescribedRecord) else None


def run_pilot(
    config: Config, *, size: int = 1000, seed: int = 0, max_wrong: float = 0.01, device: str = "cpu",
    measure: bool = True, tell: Callable[[str], None] = lambda line: None,
) -> tuple[Path, Calibration]:  # fmt: skip
    """Run a pilot over a sample of a configuration's input.

    Args:
        size: number of records to draw.
        seed: seed of the sample.
        max_wrong: the highest acceptable share of contexts that come from another speaker.
        device: ``cpu`` or ``cuda``.
        measure: also measure the rates of the stages after match, which needs the codecs.
        tell: a function that is called with a line of text before each step.

    Returns:
        The path of the file with the result in the run directory, and the result.

    Raises:
        ConfigError: the configuration cannot be used, or the input has no records.
    """
    path = RunDir(Path(config.run_dir)).calibration
    with disk_errors(path.parent, PUT_BACK):
        require_writable(path.parent)
        remove_temp_files(path.parent, {path.name})
    tell("reading all records to find their speaker groups")
    records = read_pilot(config, size, seed)
    refuse((not records.num_records, "the sources have no records"), code="bad_manifest")
    advice, similarities = None, None
    embedded: dict[int, EmbeddedSegment] = {}
    drawn, kept = len(records.sample.rows), len(records.utterances)
    rates = [_rate(records, PrepareStage.kind, seconds_per_cost=records.seconds_per_record, cost=drawn, count=drawn)]
    lost = {place: (PrepareStage.kind, why) for place, why in records.rejects.items()}
    if (match := config.find(MatchConfig)) is not None:
        tell(f"embedding {kept} utterances of {records.sample.num_groups} groups")
        kind, started = check_device(device), time.monotonic()
        reader = SegmentReader(segment_roots(config), config.section(PrepareConfig).duration_tolerance)
        segments = [one.segment for one in records.utterances]
        num_feeders = RunOptions.from_config(config).num_feeders(device)
        with closing(make_embedder(match, reader, device, num_feeders)) as embed:
            loaded = time.monotonic()
            take_delays()
            outcomes = embed(segments)
            embedding_seconds, delays = time.monotonic() - loaded, take_delays()
            decoding = embed.feeders.take_cpu_seconds() or delays.get("decoding", 0.0)
        for utterance, found in zip(records.utterances, outcomes, strict=True):
            if isinstance(found, RejectRecord):
                lost[utterance.index] = MatchStage.kind, found
            else:
                embedded[utterance.index] = found
        audio = max(1e-9, sum(segment.duration for segment in segments))
        rates.append(_rate(
            records, MatchStage.kind, kind, seconds_to_start=loaded - started,
            seconds_per_cost=embedding_seconds / audio, cost=audio, count=kept,
            decoding_per_cost=decoding / audio, model_per_cost=delays.get("model", 0.0) / audio,
        ))  # fmt: skip
        tell("choosing contexts")
        voices = _choose(config, match, records, embedded, lost)
        similarities = SimilarityCounts(
            within_groups=_count_similarities(voices, voices.is_within),
            across_groups=_count_similarities(voices, voices.is_across),
        )
        largest = float(np.bincount(voices.groups, voices.weights).max(initial=0.0))
        is_in_doubt = is_doubtful(largest, len({one.segment.recording for one in records.utterances}))
        advice = advise(voices, max_wrong, min_similarity(match) if is_in_doubt else 0.0)
    copies = [one.context.similarity for one in records.utterances if one.context and _is_near_copy(one, one.context)]
    # Store the names as they were written in the configuration, without values from the environment.
    hide_at = config.references.hide_at
    outcome = Calibration(
        name=hide_at(("name",), config.name), seed=seed, device=device,
        encoder=None if match is None else hide_at((MatchStage.kind, "encoder"), match.encoder),
        num_records=records.num_records, num_drawn=drawn,
        num_groups=records.sample.num_groups, num_partial_groups=records.sample.num_partial,
        rejects=_share_rejects(records, lost, config.references),
        formats=[
            AudioFormat(format=name, sampling_rate=rate, channels=channels, count=count)
            for (name, rate, channels), count in records.formats.most_common()
        ],
        advice=advice, similarities=similarities,
        audio_seconds=sum(one.segment.duration for one in records.utterances if one.index in embedded),
        rates=[], near_copies=len(copies), max_similarity=math.ceil(100 * min(copies) - 1) / 100 if copies else None,
        **_durations(config, records),
    )  # fmt: skip
    # Store the result before the rates are measured, so that an error of a later stage does not lose the advice.
    _store(path, outcome)
    if measure:
        tell("measuring the rates of the later stages on a small dataset")
        rates += run_small(config, records.utterances, drawn)
        outcome = msgspec.structs.replace(outcome, rates=rates)
        _store(path, outcome)
    return path, outcome


def _store(path: Path, outcome: Calibration) -> None:
    with disk_errors(path.parent, PUT_BACK):
        write_atomic(path, msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n")


def _rate(
    records: PilotRecords, name: str, device: str = "", *, seconds_per_cost: float, cost: float, count: int,
    seconds_to_start: float = 0.0, decoding_per_cost: float = 0.0, model_per_cost: float = 0.0,
) -> StageRate:  # fmt: skip
    """Return the rate of a stage that writes a manifest of ``count`` records.

    Args:
        seconds_per_cost: seconds for each unit of cost in the pilot.
        cost: the stage's total cost in the pilot.
    """
    drawn = max(1, len(records.sample.rows))
    size = sum(len(utterance.to_json()) + 1 for utterance in records.utterances)
    return StageRate(
        name=name, device=device, seconds_to_start=seconds_to_start, seconds_per_cost=seconds_per_cost,
        # A manifest is stored twice: as parts of units, and merged.
        bytes_per_cost=2 * size / max(cost, 1e-9), cost_per_record=cost / drawn,
        records_per_record=count / drawn, records_per_unit=count,
        decoding_per_cost=decoding_per_cost, model_per_cost=model_per_cost,
    )  # fmt: skip


def _choose(
    config: Config,
    match: MatchConfig,
    records: PilotRecords,
    embedded: dict[int, EmbeddedSegment],
    lost: dict[int, tuple[str, RejectRecord]],
) -> Voices:
    """Choose contexts without a threshold, and return the pilot's utterances; rejected ones are added to ``lost``."""
    # Choose the best context that the other limits allow, independently of any threshold.
    free = replace(match, min_similarity=-1.0, choice="best", contexts="choose", contexts_from_dataset=False)
    chooser = ContextChooser(free, segment_roots(config), make_speaker_key(config.prepared_key))
    utterances = sorted((one for one in records.utterances if one.index in embedded), key=chooser.group_key)
    best = []
    for _, members in groupby(utterances, key=chooser.group_key):
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
        groups=_number(map(chooser.group_key, utterances)),
        speakers=_number(tagged_speaker(one.speaker) for one in utterances),
        candidates=np.array([chooser.long_enough(one.segment.duration) for one in utterances], dtype=bool),
        best=np.array(best, dtype=np.float64),
        weights=records.sample.weights[[one.index for one in utterances]],
        reference=encoder_family(match).cross_speaker_similarities,
    )


def _is_near_copy(utterance: Utterance, context: Context) -> bool:
    """Return True if a context is probably a lossy, louder or quieter copy of the utterance itself."""
    # An MP3 copy may be up to a tenth of a second longer.
    is_as_long = abs(utterance.segment.duration - context.segment.duration) <= 0.1
    # Different utterances of the same speaker are hardly ever that similar.
    return is_as_long and context.similarity >= 0.98 and utterance.text.split() == context.text.split()


def _number(names: Iterable[str]) -> np.ndarray:
    return np.unique(np.array([*names], dtype=object).astype(str), return_inverse=True)[1].reshape(-1)


def _count_similarities(voices: Voices, pairs: np.ndarray) -> list[int]:
    return np.histogram(voices.similarities[np.triu(pairs | pairs.T, 1)], bins=50, range=(-1, 1))[0].tolist()


def _share_rejects(
    records: PilotRecords, lost: dict[int, tuple[str, RejectRecord]], references: References
) -> list[RejectShare]:
    grouped: dict[tuple[str, str], list[int]] = {}
    for place, (stage, why) in lost.items():
        grouped.setdefault((stage, why.reason), []).append(place)
    return [
        RejectShare(
            stage=stage, reason=reason, count=len(places), share=float(records.sample.weights[places].sum()),
            example=references.hide(lost[min(places)][1].detail),
        )
        for (stage, reason), places in sorted(grouped.items(), key=lambda one: -len(one[1]))
    ]  # fmt: skip


def _durations(config: Config, records: PilotRecords) -> dict[str, Any]:
    seconds = np.array([one.segment.duration for one in records.utterances])
    if not len(seconds):
        return {"durations": {}, "too_short_for_context": 0.0}
    quantiles = zip(_QUANTILES, np.quantile(seconds, _QUANTILES).tolist(), strict=True)
    short = 0.0
    if (match := config.find(MatchConfig)) is not None:
        short = float(((seconds < match.min_duration) | (seconds > (match.max_duration or np.inf))).mean())
    return {
        "durations": {f"{share:g}": round(value, 3) for share, value in quantiles},
        "too_short_for_context": short,
    }


def run_small(config: Config, utterances: Sequence[Utterance], num_drawn: int) -> list[StageRate]:
    """Write, encode and validate a small dataset of a pilot's utterances, and return the rates of the stages.

    The run directory and the dataset of this small run lie below the run directory of the configuration, so that they
    are on the same disk as a real run. They are removed at the end.

    Args:
        num_drawn: number of records in the pilot, including rejects.

    Raises:
        FatalError: a stage stopped.
    """
    if (match := config.find(MatchConfig)) is not None:
        least = min_similarity(match)
        utterances = [one for one in utterances if one.context is not None and one.context.similarity >= least]
    if not utterances:
        return []
    with tempfile.TemporaryDirectory(prefix="pilot-", dir=config.run_dir) as folder:
        small = replace(
            config, run_dir=f"{folder}/run", dataset_dir=f"{folder}/dataset", append_to=None, max_reject_fraction=1.0,
            metrics=MetricsConfig(),
        )  # fmt: skip
        if match is not None:
            small = small.with_section(replace(match, contexts_from_dataset=False))
        # Do not compare with the sources, which have more records than the pilot.
        small = small.with_section(replace(config.section(ValidateConfig), against_sources=False))
        run = RunDir(Path(small.run_dir))
        if (copies := RunDir(Path(config.run_dir)).copies).is_dir():
            # Reuse audio that the pilot has downloaded, if the disk supports hard links. Lock files are left out,
            # because a lock file with a second hard link would be refused.
            others = shutil.ignore_patterns(".lock")
            with suppress(shutil.Error):
                shutil.copytree(copies, run.copies, ignore=others, copy_function=os.link)
        # Number the utterances by their lines in the manifest.
        numbered = [replace(one, index=number) for number, one in enumerate(utterances)]
        stages, facts = make_stages(small), {"duration_tolerance": config.section(PrepareConfig).duration_tolerance}
        by_kind = {stage.kind: stage for stage in stages}
        leave_manifest(by_kind.pop(PrepareStage.kind), "pilot.json", numbered, **facts)
        if match is not None:
            leave_manifest(by_kind.pop(MatchStage.kind), "pilot_matched.json", numbered, **facts_of(match, []))
        stages = [stage for stage in stages if stage.kind in by_kind]
        executor, done = LocalExecutor(workers=1, device=config.executor.device), []
        executor.require_devices(stages)
        with locked(run) as lock:
            for stage in stages:
                if not run_stage(stage, executor, Listener(), unlocked=lock.released).ok:
                    break
                done.append(stage)
        return measure_rates(done, num_drawn)
