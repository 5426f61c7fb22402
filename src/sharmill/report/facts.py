"""Facts about a run and its dataset, from which the sections of the report are made.

With a run directory, the facts cover all cuts, since the stages record them in their commits. Without a run directory,
the facts come from the index of the dataset and a sample of its cuts. The sample also provides pairs of target and
context to listen to. It is seeded with the checksum of the index, so that the same dataset always yields the same
sample. Unreadable items are counted.
"""

import heapq
import os
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from sharmill.audio.files import decode_bytes
from sharmill.audio.sound import Sound, measure_sound
from sharmill.config import Config
from sharmill.encode.codes import read_counts
from sharmill.engine.plan import committed_files, read_ledger
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Totals
from sharmill.engine.view import StageReader, StageView, view_stage
from sharmill.errors import ConfigError, DamagedShard, RejectRecord
from sharmill.files.arrays import map_stored_array
from sharmill.files.checksums import checksum
from sharmill.files.stored import load_record, read_record, read_records, read_stored
from sharmill.inspect.cuts import StoredCut, open_stored_shard, read_codes, read_shard, read_stored_field
from sharmill.manifest import Reject
from sharmill.match.embed import unpack_voice
from sharmill.report.text import shorten
from sharmill.shar.fields import CONTEXT_AUDIO, SHARDS_FILE, TARGET_CODES, Field, codes_field
from sharmill.shar.histograms import MAX_VALUE, CutMeasures, cut_values, sound_values, supervision_of
from sharmill.shar.index import CodecRecord, DatasetRecord, FieldFile, ShardRecord, read_dataset, read_shards

_MAX_SHARDS: Final = 12
# Kinds of findings about labels, and number of findings of each kind that are shown.
LABEL_FINDINGS: Final = ("wrong_voice", "mixed_voices", "several_voices", "one_voice")
_LABELS_SHOWN: Final = 12
_MAX_CUTS_PER_SHARD: Final = 2000
# Maximum number of codebooks times codebook size for which codes are counted.
_MAX_CODES: Final = 1 << 24
# Number of cuts whose audio is decoded and whose codes are counted.
_MEASURED: Final = 400
_RANDOM_PAIRS: Final = 10
# Reason that is shown for a pair that was chosen at random.
RANDOM: Final = "random"
_WORST_PAIRS: Final = 4
_EXAMPLES: Final = 3
# Number of rejects that are searched for examples.
_LINES_SEARCHED: Final = 200_000
_DAMAGED_VOICES: Final = "the voices that a commit of match notes are damaged: {}"

# Index of a cut's shard, and the number of the cut in the shard.
_Place = tuple[int, int]


@dataclass(frozen=True)
class Pair:
    """Cut to listen to, with its measures and the reasons for choosing it."""

    stored: StoredCut
    reasons: list[str]
    values: dict[str, float]


@dataclass
class DatasetSample:
    """Facts from a sample of shards.

    Attributes:
        measures: measures of the cuts in these shards; measures of audio cover fewer cuts.
        context_uses: for each context, by its path and offset, the places of the cuts in these shards that use it.
        speakers: seconds of target audio by speaker in these shards.
        values: by field of values, its numbers in these shards, each with the place of its cut.
        ids: place of each cut in these shards, by its id.
        code_counts: by codec, the frequency of each code, shape (codebooks, codebook size).
        pairs: cuts to listen to.
        unreadable: number of unreadable items by problem.
    """

    num_shards: int
    num_cuts: int = 0
    measures: CutMeasures = field(default_factory=CutMeasures)
    context_uses: defaultdict[str, list[_Place]] = field(default_factory=lambda: defaultdict(list))
    speakers: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    values: defaultdict[str, list[tuple[float, _Place]]] = field(default_factory=lambda: defaultdict(list))
    ids: dict[str, _Place] = field(default_factory=dict)
    code_counts: dict[str, np.ndarray] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    unreadable: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def counting_damage(self, prefix: str = "", count: int = 1) -> Iterator[None]:
        """Count unreadable items instead of raising their errors."""
        try:
            yield
        except (DamagedShard, RejectRecord) as error:
            self.unreadable[f"{prefix}{error}"] += count

    def describe(self) -> str:
        """Return a phrase with the size of the sample."""
        return f"a sample of {self.num_cuts:,} cuts in {self.num_shards:,} shards"


def _sample_dataset(
    directory: Path, record: DatasetRecord, shards: Sequence[ShardRecord], seed: str, *,
    measures: CutMeasures | None, counted: Collection[str],
) -> DatasetSample:  # fmt: skip
    """Return a sample of a dataset.

    Args:
        seed: the checksum of the index.
        measures: measures of all cuts from a run directory, if available. They provide the extreme cuts and replace the
            audio measures of the sample.
        counted: codecs whose codes are already counted in a run directory.
    """
    rng = np.random.default_rng(list(seed.encode()))
    filled = [shard for shard in shards if shard.count]
    chosen = [filled[n] for n in sorted(rng.permutation(len(filled))[:_MAX_SHARDS].tolist())]
    sample, places = DatasetSample(len(chosen)), list[_Place]()
    for shard in chosen:
        with sample.counting_damage(count=shard.count):
            cuts = list(read_shard(directory, shard))[:_MAX_CUTS_PER_SHARD]
            values = [cut_values(cut) for cut in cuts]
            sample.measures.add(CutMeasures.from_rows(values, shard.index))
            for number, (cut, of_cut) in enumerate(zip(cuts, values, strict=True)):
                places.append((shard.index, number))
                sample.ids[str(cut.get("id"))] = places[-1]
                supervision, custom = supervision_of(cut)
                if supervision:
                    sample.speakers[str(supervision.get("speaker"))] += of_cut.get("duration", 0.0)
                if "context_audio_filepath" in custom:
                    context = f"{custom['context_audio_filepath']} {custom.get('context_audio_offset')}"
                    sample.context_uses[context].append(places[-1])
        for layout in record.layout:
            if layout.kind == "value":
                with sample.counting_damage():
                    sample.values[layout.name] += _numbers(directory, shard, layout)
    sample.num_cuts = len(places)
    order = rng.permutation(len(places)).tolist()
    by_index = {shard.index: shard for shard in shards}
    codecs = [
        codec
        for codec in record.codecs
        if codec.name not in counted and codec.num_codebooks * codec.codebook_size <= _MAX_CODES
    ]
    sample.code_counts = {
        codec.name: np.zeros((codec.num_codebooks, codec.codebook_size), np.int64) for codec in codecs
    }
    if codecs or measures is None or not measures.has_sound:
        _measure_cuts(
            sample, record, codecs,
            read_cuts_at(sample, directory, by_index, sorted(places[n] for n in order[:_MEASURED])),
        )  # fmt: skip
    of_all = {name: found for name, found in (measures.extremes if measures else {}).items() if found}
    worst = {
        name: [(shard, number) for _, shard, number in found]
        for name, found in (sample.measures.extremes | of_all).items()
    }
    most_used = heapq.nlargest(_WORST_PAIRS, sample.context_uses.values(), key=len)
    worst["most used context"] = [uses[0] for uses in most_used if len(uses) > 1]
    reasons = {places[n]: [RANDOM] for n in order[:_RANDOM_PAIRS]}
    for name, found_places in worst.items():
        for place in found_places[:_WORST_PAIRS]:
            reasons.setdefault(place, []).append(name)
    for stored in read_cuts_at(sample, directory, by_index, reasons):
        of_stored = cut_values(stored.cut) | _sound_values(sample, record, stored)
        sample.pairs.append(Pair(stored, reasons[stored.shard, stored.number], of_stored))
    return sample


def _numbers(directory: Path, shard: ShardRecord, layout: Field) -> list[tuple[float, _Place]]:
    """Return the finite numbers of a field of values in a shard, each with the place of its cut."""
    items = islice(read_stored_field(directory, shard, layout.name), _MAX_CUTS_PER_SHARD)
    values = [(item.metadata or {}).get(layout.attribute) for item in items]
    return [
        (float(value), (shard.index, number))
        for number, value in enumerate(values)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_VALUE
    ]


def read_cuts_at(
    sample: DatasetSample, directory: Path, shards: Mapping[int, ShardRecord], places: Iterable[_Place]
) -> Iterator[StoredCut]:
    """Yield the cuts at these places in the given order; count unreadable cuts instead of yielding them."""
    for index, group in groupby(places, key=itemgetter(0)):
        with sample.counting_damage():
            if index not in shards:
                # The run directory belongs to another dataset or is damaged.
                raise DamagedShard(f"{directory} has no shard {index}, although the run directory names a cut in it")
            read = open_stored_shard(directory, shards[index])
            for _, number in group:
                with sample.counting_damage():
                    yield read(number)


def _measure_cuts(
    sample: DatasetSample, record: DatasetRecord, codecs: Sequence[CodecRecord], cuts: Iterable[StoredCut]
) -> None:
    """Add the audio measures of cuts, and count the codes of their targets."""
    for stored in cuts:
        # Add empty rows before the row, so that its index equals the number of the cut in the shard.
        rows: list[dict[str, float]] = [{}] * stored.number + [_sound_values(sample, record, stored)]
        sample.measures.add(CutMeasures.from_rows(rows, stored.shard))
        for codec in codecs:
            item = stored.items.get(codes_field(codec.name, TARGET_CODES))
            if item is not None and item.data is not None:
                with sample.counting_damage():
                    codes, size = read_codes(item), codec.codebook_size
                    if len(codes) != codec.num_codebooks or (codes.size and not 0 <= codes.min() <= codes.max() < size):
                        raise DamagedShard(f"{item.cut_id}: codes outside the codebooks")
                    sample.code_counts[codec.name] += np.stack([np.bincount(row, minlength=size) for row in codes])


def _sound_values(sample: DatasetSample, record: DatasetRecord, stored: StoredCut) -> dict[str, float]:
    """Return the audio measures of a cut; unreadable audio is left out and counted."""
    sounds: dict[bool, Sound] = {}
    for name in record.audio_fields:
        item = stored.items.get(name)
        if item is not None and item.data is not None:
            with sample.counting_damage(f"{item.cut_id}: "):
                sounds[name == CONTEXT_AUDIO] = measure_sound(*decode_bytes(item.data))
    return sound_values(sounds.get(False), sounds.get(True))


@dataclass(frozen=True)
class StageFacts:
    """Facts about a stage, or about one round of a stage: its counts of records, and its times.

    Attributes:
        view: progress and pace.
        counts: the name of what is counted in ``totals``, such as records.
        totals: the totals; None until the stage is finished.
        examples: examples of rejects by reason, each with a sentence and the name of the record.
    """

    view: StageView
    kind: str
    counts: str
    totals: Totals | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


@dataclass
class RunFacts:
    """Facts that are available only from a run directory.

    Attributes:
        run_dir: the run directory.
        config: the resolved configuration, as YAML.
        stats: hours by dataset, language and speaker from ``stats.json``; empty until ``prepare`` is finished.
        voices: sampled utterances, each with the name of its group and its embedding.
        measures: measures of all cuts; None until ``write`` is finished.
        context_uses: number of uses of each segment as context.
        code_counts: by codec, the frequency of each code in all segments, shape (codebooks, codebook size).
        labels: findings of the stage ``voices`` about the labels, the clearest first.
    """

    run_dir: RunDir
    config: str
    stages: list[StageFacts] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    voices: list[tuple[str, np.ndarray]] = field(default_factory=list)
    measures: CutMeasures | None = None
    context_uses: np.ndarray | None = None
    code_counts: dict[str, np.ndarray] = field(default_factory=dict)
    labels: list["LabelFinding"] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts for the report.

    Attributes:
        name: name of the dataset.
        dataset_dir: the dataset directory.
        record: record of the dataset; None if the report does not cover the dataset.
        shards: shards of the dataset.
        absence: the reason why the report does not cover the dataset; empty if it does.
        run: facts of the run directory; None without one.
        models: codecs that may be loaded to decode codes: name in the dataset -> model named by the user.
        decode: True if codecs may be loaded to decode codes.
    """

    name: str
    dataset_dir: Path
    record: DatasetRecord | None
    shards: list[ShardRecord]
    absence: str = ""
    run: RunFacts | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    decode: bool = True

    @cached_property
    def index_checksum(self) -> str:
        """Checksum of the index, which contains the checksums of all files."""
        return checksum(self.dataset_dir / SHARDS_FILE)

    @cached_property
    def sample(self) -> DatasetSample | None:
        """Sample of the cuts, seeded with the checksum of the index; None without cuts."""
        if self.record is None or not self.record.num_cuts:
            return None
        return _sample_dataset(
            self.dataset_dir, self.record, self.shards, self.index_checksum,
            measures=self.run.measures if self.run else None, counted=self.run.code_counts if self.run else (),
        )  # fmt: skip

    @cached_property
    def all_measures(self) -> list[CutMeasures]:
        """Measures of all cuts of the run, followed by measures of the sample; unavailable ones are left out."""
        found = (self.run.measures if self.run else None, self.sample.measures if self.sample else None)
        return [measures for measures in found if measures is not None]

    @property
    def measures(self) -> CutMeasures | None:
        """Measures of all cuts if available, otherwise those of the sample; None if there are none."""
        return next(iter(self.all_measures), None)

    @property
    def sound(self) -> CutMeasures | None:
        """Measures that include audio: from the run if available, otherwise from the sample; None if there are none."""
        return next((measures for measures in self.all_measures if measures.has_sound), None)

    @property
    def has_other_cuts(self) -> bool:
        """True if the dataset contains cuts from other runs, which were appended to it."""
        measures = self.run and self.run.measures
        return bool(self.record and measures and measures.num_cuts != self.record.num_cuts)

    @property
    def origin_of_run(self) -> str:
        """Phrase for the cuts that are covered by the numbers from the run directory."""
        return "the cuts of this run, a part of the dataset" if self.has_other_cuts else "all cuts"

    @property
    def origin(self) -> str:
        """Phrase for the cuts that are covered by ``measures``."""
        if self.run is not None and self.run.measures is not None:
            return self.origin_of_run
        return self.sample.describe() if self.sample else "nothing"


def read_dataset_facts(directory: Path, models: Mapping[str, str]) -> Facts:
    """Return the facts about a dataset without its run directory.

    Raises:
        ConfigError: the folder is not a finished dataset.
        DamagedShard: the index is damaged.
    """
    record = read_dataset(directory)
    return Facts(
        name=record.name,
        dataset_dir=directory,
        record=record,
        shards=list(read_shards(directory, record.num_shards)),
        models=models,
    )


def read_run_facts(
    config: Config, stages: Sequence[StageRun], models: Mapping[str, str], *, decode: bool = True
) -> Facts:
    """Return the facts about a run and its dataset; the run may be unfinished, and the dataset may be missing.

    Args:
        stages: all stages of the run.
        models: models of codecs that may be loaded, by name of the codec in the dataset.
        decode: True if codecs may be loaded to decode codes.
    """
    run_dir, dataset_dir = RunDir(Path(config.run_dir)), Path(config.dataset_dir)
    run = RunFacts(run_dir, read_stored(run_dir.config).decode(errors="replace"))
    if (stats := read_record(run_dir.stats, _Stats)) is not None:
        run.stats = msgspec.to_builtins(stats)
    measures = CutMeasures()
    for stage in stages:
        run.stages.append(facts := _read_stage(stage, measures, run.voices))
        if stage.kind == "encode":
            counts = read_counts(stage)
            run.code_counts |= {} if counts is None else {stage.settings.name: counts}
        elif stage.kind == "write" and facts.totals:
            run.measures = measures
        elif stage.kind == "voices" and facts.totals:
            path = stage.product("voices/labels")
            run.labels = _clearest(read_records(path, LabelFinding))
        elif stage.kind == "encode.segments" and facts.totals:
            # The rows after the first one are contexts, if the dataset has contexts.
            uses = np.bincount(np.ravel(map_stored_array(stage.product("encode.segments/numbers"))[1:]))
            run.context_uses = uses[uses > 0]
    about_run = Facts(
        name=config.name, dataset_dir=dataset_dir, record=None, shards=[], run=run, models=models, decode=decode
    )
    try:
        record = read_dataset(dataset_dir)
        shards = list(read_shards(dataset_dir, record.num_shards))
    except ConfigError as error:
        return replace(about_run, absence=str(error))
    if run_dir.config.stat().st_uid != os.geteuid() and not _wrote_all(stages, shards):
        return replace(about_run, absence=(
            f"{run_dir.config} belongs to another user, and the run did not write all of the dataset; run sharmill "
            f"report {dataset_dir} for a report on the dataset"
        ))  # fmt: skip
    return replace(about_run, record=record, shards=shards)


def _wrote_all(stages: Sequence[StageRun], shards: Sequence[ShardRecord]) -> bool:
    """Return True if the ledgers of a run contain all files of a dataset with these shards.

    Without this check, a configuration of another user could name a dataset that only the current user may read, and
    its contents would appear on a page in the other user's run directory.
    """
    files = [file for stage in stages if stage.shares_root for file in committed_files(stage)]
    own = {FieldFile(file.name, file.size, file.xxh3) for file in files}
    return all(own.issuperset(shard.fields.values()) for shard in shards)


def _read_stage(stage: StageRun, measures: CutMeasures, voices: list[tuple[str, np.ndarray]]) -> StageFacts:
    """Return the facts of a stage, and add the measures and voices from its commits."""
    if not stage.dir.units.exists():
        return StageFacts(StageReader(stage).read(), stage.kind, stage.counts)
    units, totals = stage.dir.read_units(), stage.dir.read_totals()
    commits = read_ledger(stage.dir, units)
    for _, commit in sorted(commits.items()):
        if stage.kind == "write":
            if "cuts" not in commit.stats:
                raise ConfigError(
                    "a commit of the stage write lacks the measures of its cuts: name the dataset instead of the run "
                    "directory",
                    code="damaged_run_dir",
                )
            measures.add(CutMeasures.unpack(commit.stats["cuts"]))
        elif stage.kind == "match":
            try:
                noted = msgspec.convert(commit.stats.get("voices", []), list[tuple[Any, str]])
                voices += [(shorten(group), unpack_voice(text)) for group, text in noted]
            except ValueError as error:
                raise ConfigError(_DAMAGED_VOICES.format(error), code="damaged_run_dir") from error
    if len({len(embedding) for _, embedding in voices}) > 1:
        raise ConfigError(_DAMAGED_VOICES.format("embeddings of several lengths"), code="damaged_run_dir")
    return StageFacts(
        view_stage(stage, units, commits, (), 0.0, totals=totals),
        stage.kind,
        stage.counts,
        totals,
        load_record(stage.dir.identity, dict[str, Any]),
        _examples(stage.dir.rejects, totals.rejects) if totals and totals.rejects else {},
    )


class LabelFinding(msgspec.Struct):
    """A line of the stage ``voices`` in ``labels.jsonl``; see docs/voices.md."""

    finding: str
    id: str = ""
    group: str = ""
    groups: list[str] = []
    other_group: str = ""
    own: float = 0.0
    other: float = 0.0
    margin: float = 0.0
    similarity: float = 0.0
    at: float = 0.0
    voices: list[dict[str, Any]] = []


def _clearest(findings: Iterable[LabelFinding]) -> list[LabelFinding]:
    """Return the findings with the lowest margin or similarity, ordered by kind."""
    kept: dict[str, list[LabelFinding]] = {kind: [] for kind in LABEL_FINDINGS}
    for one in findings:
        if (best := kept.get(one.finding)) is not None:
            insort(best, one, key=lambda one: (one.margin or one.similarity, one.id, one.group))
            del best[_LABELS_SHOWN:]
    return [one for best in kept.values() for one in best]


class _Hours(msgspec.Struct):
    records_in: int
    records_out: int
    hours_in: float
    hours_out: float


class _Stats(_Hours):
    """The part of ``stats.json`` that is used in the report."""

    by_dataset: dict[str, _Hours]
    by_language: dict[str, _Hours]
    by_speaker: dict[str, _Hours]


def _examples(path: Path, reasons: dict[str, int]) -> dict[str, list[tuple[str, str]]]:
    """Return the first rejects for each reason: the detail of each reject, and the name of its record."""
    found = defaultdict[str, list[tuple[str, str]]](list)
    missing = sum(min(count, _EXAMPLES) for count in reasons.values())
    for reject in islice(read_records(path, Reject), _LINES_SEARCHED):
        if len(found[reject.reason]) < _EXAMPLES:
            record = reject.record
            name = record.get("audio_filepath", record) if isinstance(record, dict) else record
            found[reject.reason].append((shorten(reject.detail), shorten(name)))
            missing -= 1
        if not missing:
            break
    return found
