"""Facts about a run and its dataset that the sections of the page are made of.

Of a run directory they are complete: the stages have noted them in their commit records. Of a dataset alone they come
from its index and a sample of its cuts, with pairs that are worth hearing. The same dataset gives the same sample,
which is drawn by the checksum of the index. Items that cannot be read are counted.
"""

import heapq
import os
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
from sharmill.inspect.cuts import StoredCut, open_stored_shard, read_codes, read_shard
from sharmill.manifest import Reject
from sharmill.match.embed import unpack_voice
from sharmill.report.text import shorten
from sharmill.shar.fields import CONTEXT_AUDIO, SHARDS_FILE, TARGET_CODES, codes_field
from sharmill.shar.histograms import CutMeasures, cut_values, sound_values, supervision_of
from sharmill.shar.index import CodecRecord, DatasetRecord, FieldFile, ShardRecord, read_dataset, read_shards

_MAX_SHARDS: Final = 12
_MAX_CUTS_PER_SHARD: Final = 2000
# The most codes of a codec whose use is counted.
_MAX_CODES: Final = 1 << 24
# Cuts whose audio is decoded and whose codes are counted.
_MEASURED: Final = 400
_RANDOM_PAIRS: Final = 10
# The reason for which they were chosen.
RANDOM: Final = "random"
_WORST_PAIRS: Final = 4
_EXAMPLES: Final = 3
# Lines of rejects in which examples are looked for.
_LINES_SEARCHED: Final = 200_000
_DAMAGED_VOICES: Final = "the voices that a commit of match notes are damaged: {}"

# A cut by its shard and its number there.
_Place = tuple[int, int]


@dataclass(frozen=True)
class Pair:
    """A cut to listen to, and the reasons for which it was chosen."""

    stored: StoredCut
    reasons: list[str]
    values: dict[str, float]


@dataclass
class DatasetSample:
    """The finds in a sample of shards.

    Attributes:
        measures: of the cuts in the sampled shards; those of audio are of fewer.
        context_uses: where each context occurs in these shards, by its path and offset.
        speakers: seconds of target audio by speaker in these shards.
        code_counts: for each codec how often each code was seen (codebooks, codebook size).
        unreadable: how many items could not be read, by what was wrong.
    """

    num_shards: int
    num_cuts: int = 0
    measures: CutMeasures = field(default_factory=CutMeasures)
    context_uses: defaultdict[str, list[_Place]] = field(default_factory=lambda: defaultdict(list))
    speakers: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    code_counts: dict[str, np.ndarray] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    unreadable: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def counting_damage(self, prefix: str = "", count: int = 1) -> Iterator[None]:
        """Count items that cannot be read, and go on."""
        try:
            yield
        except (DamagedShard, RejectRecord) as error:
            self.unreadable[f"{prefix}{error}"] += count

    def describe(self) -> str:
        """Return a phrase that says how large the sample is."""
        return f"a sample of {self.num_cuts:,} cuts in {self.num_shards:,} shards"


def _sample_dataset(
    directory: Path, record: DatasetRecord, shards: Sequence[ShardRecord], seed: str, *,
    measures: CutMeasures | None, counted: Collection[str],
) -> DatasetSample:  # fmt: skip
    """Return a sample of a dataset.

    Args:
        seed: the checksum of the index.
        measures: of all cuts, where a run directory has them: they name the extreme cuts, and those of audio are not
            taken from the sample.
        counted: codecs whose codes a run directory has counted, which need not be counted in the sample.
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
                supervision, custom = supervision_of(cut)
                if supervision:
                    sample.speakers[str(supervision.get("speaker"))] += of_cut.get("duration", 0.0)
                if "context_audio_filepath" in custom:
                    context = f"{custom['context_audio_filepath']} {custom.get('context_audio_offset')}"
                    sample.context_uses[context].append(places[-1])
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
            _read_cuts(sample, directory, by_index, sorted(places[n] for n in order[:_MEASURED])),
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
    for stored in _read_cuts(sample, directory, by_index, reasons):
        of_stored = cut_values(stored.cut) | _sound_values(sample, record, stored)
        sample.pairs.append(Pair(stored, reasons[stored.shard, stored.number], of_stored))
    return sample


def _read_cuts(
    sample: DatasetSample, directory: Path, shards: Mapping[int, ShardRecord], places: Iterable[_Place]
) -> Iterator[StoredCut]:
    """Yield the cuts at places, shard and number, in their order; those that cannot be read are counted."""
    for index, group in groupby(places, key=itemgetter(0)):
        with sample.counting_damage():
            if index not in shards:
                # The run directory is not that of this dataset, or its files are damaged.
                raise DamagedShard(f"{directory} has no shard {index}, of which the run directory names a cut")
            read = open_stored_shard(directory, shards[index])
            for _, number in group:
                with sample.counting_damage():
                    yield read(number)


def _measure_cuts(
    sample: DatasetSample, record: DatasetRecord, codecs: Sequence[CodecRecord], cuts: Iterable[StoredCut]
) -> None:
    """Add measures of the audio of cuts, and count the codes of codecs in their targets."""
    for stored in cuts:
        # Among rows without values, so that the places of the extremes are those of the cuts.
        rows: list[dict[str, float]] = [{}] * stored.number + [_sound_values(sample, record, stored)]
        sample.measures.add(CutMeasures.from_rows(rows, stored.shard))
        for codec in codecs:
            item = stored.items.get(codes_field(codec.name, TARGET_CODES))
            if item is not None and item.data is not None:
                with sample.counting_damage():
                    codes, size = read_codes(item), codec.codebook_size
                    if len(codes) != codec.num_codebooks or (codes.size and not 0 <= codes.min() <= codes.max() < size):
                        raise DamagedShard(f"{item.cut_id}: codes beyond the codebooks")
                    sample.code_counts[codec.name] += np.stack([np.bincount(row, minlength=size) for row in codes])


def _sound_values(sample: DatasetSample, record: DatasetRecord, stored: StoredCut) -> dict[str, float]:
    """Return the measures of the audio of a cut, as far as it can be read."""
    sounds: dict[bool, Sound] = {}
    for name in record.audio_fields:
        item = stored.items.get(name)
        if item is not None and item.data is not None:
            with sample.counting_damage(f"{item.cut_id}: "):
                sounds[name == CONTEXT_AUDIO] = measure_sound(*decode_bytes(item.data))
    return sound_values(sounds.get(False), sounds.get(True))


@dataclass(frozen=True)
class StageFacts:
    """The accounts and the times of a stage, which may be a round of the step that users know.

    ``view`` has its units and its pace. ``totals`` is None as long as it is not finished; it is of what the stage
    ``counts``. ``examples`` are rejects by reason: a sentence and what the record is called.
    """

    view: StageView
    kind: str
    counts: str
    totals: Totals | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


@dataclass
class RunFacts:
    """Facts that only a run directory has.

    Attributes:
        run_dir: where it is.
        config: the resolved configuration, as YAML.
        stats: hours by dataset, language and speaker, as ``stats.json`` has them; empty before prepare has ended.
        voices: names of groups, and the embedding of an utterance of each, sampled.
        measures: of all cuts, once they are written.
        context_uses: how often each segment serves as context.
        code_counts: for each codec how often each code occurs in all segments (codebooks, codebook size).
    """

    run_dir: RunDir
    config: str
    stages: list[StageFacts] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    voices: list[tuple[str, np.ndarray]] = field(default_factory=list)
    measures: CutMeasures | None = None
    context_uses: np.ndarray | None = None
    code_counts: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that the page is made of.

    Attributes:
        name: of the dataset.
        dataset_dir: where it is.
        record: the content of its index; None if it is not on the page.
        shards: its shards.
        absence: the reason that it is not on the page; empty if it is.
        run: of a run directory.
        models: the codecs that may be loaded to decode codes: name in the dataset -> model, as the user named it.
        decode: load codecs.
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
        """The checksum of the index, in which are those of all files."""
        return checksum(self.dataset_dir / SHARDS_FILE)

    @cached_property
    def sample(self) -> DatasetSample | None:
        """A sample of the cuts, drawn by the checksum of the index: the same for the same dataset."""
        if self.record is None or not self.record.num_cuts:
            return None
        return _sample_dataset(
            self.dataset_dir, self.record, self.shards, self.index_checksum,
            measures=self.run.measures if self.run else None, counted=self.run.code_counts if self.run else (),
        )  # fmt: skip

    @cached_property
    def all_measures(self) -> list[CutMeasures]:
        """The measures of the cuts of the run, and those of the sample, as far as there are any."""
        found = (self.run.measures if self.run else None, self.sample.measures if self.sample else None)
        return [measures for measures in found if measures is not None]

    @property
    def measures(self) -> CutMeasures | None:
        """The measures of all cuts, or else of the sample."""
        return next(iter(self.all_measures), None)

    @property
    def sound(self) -> CutMeasures | None:
        """The measures of audio: those that the stages noted, or else those of a sample of audio, or None."""
        return next((measures for measures in self.all_measures if measures.has_sound), None)

    @property
    def has_other_cuts(self) -> bool:
        """True if the dataset has cuts that the run did not write: others were appended to it."""
        measures = self.run and self.run.measures
        return bool(self.record and measures and measures.num_cuts != self.record.num_cuts)

    @property
    def origin_of_run(self) -> str:
        """A phrase about what the numbers of the run directory are of."""
        return "the cuts of this run, a part of the dataset" if self.has_other_cuts else "all cuts"

    @property
    def origin(self) -> str:
        """A phrase about what ``measures`` are of."""
        if self.run is not None and self.run.measures is not None:
            return self.origin_of_run
        return self.sample.describe() if self.sample else "nothing"


def read_dataset_facts(directory: Path, models: Mapping[str, str]) -> Facts:
    """Return the facts about a dataset without its run directory.

    Raises:
        ConfigError: there is no finished dataset.
        DamagedShard: its index is damaged.
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
    """Return the facts about a run, which need not be finished, and its dataset, which need not be there.

    Args:
        stages: all stages of the run.
        models: codecs that may be loaded, by their names in the dataset.
        decode: load codecs.
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
        elif stage.kind == "encode.segments" and facts.totals:
            # The second row is of contexts, if the dataset has any.
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
            f"{run_dir.config} belongs to another user, and not all of that dataset was made by this run; sharmill "
            f"report {dataset_dir} shows it"
        ))  # fmt: skip
    return replace(about_run, record=record, shards=shards)


def _wrote_all(stages: Sequence[StageRun], shards: Sequence[ShardRecord]) -> bool:
    """Return True if the ledgers of a run have all files of a dataset with these shards.

    The configuration of another user may name any dataset that this user alone may read, and that user would find the
    page in the run directory.
    """
    files = [file for stage in stages if stage.shares_root for file in committed_files(stage)]
    own = {FieldFile(file.name, file.size, file.xxh3) for file in files}
    return all(own.issuperset(shard.fields.values()) for shard in shards)


def _read_stage(stage: StageRun, measures: CutMeasures, voices: list[tuple[str, np.ndarray]]) -> StageFacts:
    """Return the facts of a stage; add what its commits have noted."""
    if not stage.dir.units.exists():
        return StageFacts(StageReader(stage).read(), stage.kind, stage.counts)
    units, totals = stage.dir.read_units(), stage.dir.read_totals()
    commits = read_ledger(stage.dir, units)
    for _, commit in sorted(commits.items()):
        if stage.kind == "write":
            if "cuts" not in commit.stats:
                raise ConfigError(
                    "a commit of write has no measures of its cuts: name the dataset instead of the run directory",
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


class _Hours(msgspec.Struct):
    records_in: int
    records_out: int
    hours_in: float
    hours_out: float


class _Stats(_Hours):
    """The part of ``stats.json`` that a page shows."""

    by_dataset: dict[str, _Hours]
    by_language: dict[str, _Hours]
    by_speaker: dict[str, _Hours]


def _examples(path: Path, reasons: dict[str, int]) -> dict[str, list[tuple[str, str]]]:
    """Return the first rejects of each reason."""
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
