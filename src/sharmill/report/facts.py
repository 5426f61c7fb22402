"""Facts about a run and its dataset that the sections of the page are made of.

Of a run directory they are complete: the stages have noted them in their commit records. Of a dataset alone they come
from its index and a sample of its shards.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from sharmill.config import Config
from sharmill.encode.config import EncodeConfig
from sharmill.encode.segment_codes import encoded_file, read_counts
from sharmill.encode.stage import EncodeStage
from sharmill.encode.survey import SurveyStage
from sharmill.engine.ledger import iterate_ledger
from sharmill.engine.plan import iterate_plan
from sharmill.engine.run import read_totals
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Totals
from sharmill.errors import ConfigError
from sharmill.files.storage import checksum
from sharmill.files.stored import decode_stored, read_stored, read_stored_lines
from sharmill.match.stage import MatchStage
from sharmill.match.voices import unpack_voice
from sharmill.report.sample import DatasetSample, sample_dataset
from sharmill.report.section import shorten
from sharmill.shar.histograms import CutMeasures
from sharmill.shar.index import DatasetRecord, ShardRecord, read_dataset, read_shards
from sharmill.shar.layout import SHARDS_FILE
from sharmill.write.stage import WriteStage

_EXAMPLES: Final = 3
# Lines of rejects in which examples are looked for.
_LINES_SEARCHED: Final = 200_000


@dataclass(frozen=True)
class RejectExample:
    """A record that was rejected: the sentence about it, and what it is called."""

    sentence: str
    record: str


@dataclass(frozen=True, kw_only=True)
class StageFacts:
    """The accounts and the times of a stage.

    ``totals`` is None as long as it is not finished; it is of what the stage ``counts``. ``cost_by_rank`` is in
    ``cost_unit``, ``seconds_by_rank`` the time that the units took there. ``memory_mb`` is the most that a rank has
    held, ``memory_asked_mb`` the least that one's job had asked for, 0 where that is not known. ``examples`` are
    rejects by reason.
    """

    name: str
    cost_unit: str
    counts: str
    totals: Totals | None
    num_units: int = 0
    num_done: int = 0
    cost_by_rank: dict[int, float] = field(default_factory=dict)
    seconds_by_rank: dict[int, float] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    num_hosts: int = 0
    memory_mb: float = 0.0
    memory_asked_mb: float = 0.0
    identity: dict[str, Any] = field(default_factory=dict)
    examples: dict[str, list[RejectExample]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts that only a run directory has.

    Attributes:
        run_dir: where it is.
        config: the resolved configuration, as YAML.
        stats: hours by dataset, language and speaker, as ``stats.json`` has them; empty before prepare has ended.
        voices: names of groups, and the embedding of an utterance of each, sampled.
        code_counts: for each codec how often each code occurs in all segments (codebooks, codebook size).
    """

    run_dir: RunDir
    config: str
    stages: list[StageFacts]
    stats: dict[str, Any]
    voices: list[tuple[str, np.ndarray]]
    measures: CutMeasures | None
    context_uses: np.ndarray | None
    code_counts: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that the page is made of.

    Attributes:
        name: of the dataset.
        dataset_dir: where it is.
        record: what its index says of it; None where there is no finished dataset.
        shards: its shards.
        run: of a run directory.
        models: the codecs that may be loaded to decode codes: name in the dataset -> model, as the user named it.
        decode: load codecs.
    """

    name: str
    dataset_dir: Path
    record: DatasetRecord | None
    shards: list[ShardRecord]
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
        return sample_dataset(
            self.dataset_dir, self.record, self.shards, self.index_checksum,
            measures=self.run.measures if self.run else None, counted=self.run.code_counts if self.run else (),
        )  # fmt: skip

    @property
    def measures(self) -> CutMeasures | None:
        """The measures of all cuts, or else of the sample."""
        if self.run is not None and self.run.measures is not None:
            return self.run.measures
        return self.sample.measures if self.sample else None

    @property
    def sound(self) -> CutMeasures | None:
        """The measures of audio: those that the stages noted, or else those of a sample of audio, or None."""
        if self.run is not None and self.run.measures is not None and self.run.measures.has_sound:
            return self.run.measures
        return self.sample.measures if self.sample and self.sample.measures.has_sound else None

    @property
    def has_other_cuts(self) -> bool:
        """True if the dataset has cuts that the run did not write: others were appended to it."""
        if self.record is None or self.run is None or self.run.measures is None:
            return False
        return self.run.measures.num_cuts != self.record.num_cuts

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
    shards = list(read_shards(directory, record.num_shards))
    return Facts(name=record.name, dataset_dir=directory, record=record, shards=shards, models=models)


def own_models(config: Config) -> dict[str, str]:
    """Return the codecs that a configuration names itself, by their names in the dataset."""
    return {codec.name: codec.model for codec in config.section(EncodeConfig).codecs if codec.model != "builtin"}


def read_run_facts(config: Config, stages: Sequence[Stage], models: Mapping[str, str], *, decode: bool = True) -> Facts:
    """Return the facts about a run, which need not be finished, and its dataset, which need not be there.

    Args:
        stages: all stages of the run.
        models: codecs that may be loaded, by their names in the dataset.
        decode: load codecs.
    """
    run_dir, dataset_dir = RunDir(Path(config.run_dir)), Path(config.dataset_dir)
    noted = _Noted()
    found = [_read_stage(stage, noted) for stage in stages]
    path = run_dir.stats
    stats: _Stats | dict[str, Any] = decode_stored(path, read_stored(path), _Stats) if path.exists() else {}
    by_kind = {stage.kind: (stage, read) for stage, read in zip(stages, found, strict=True)}
    run = RunFacts(
        run_dir=run_dir,
        config=read_stored(run_dir.config).decode(errors="replace"),
        stages=found,
        stats=msgspec.to_builtins(stats),
        voices=[voice for _, voice in sorted(noted.voices, key=itemgetter(0))],
        measures=noted.measures if by_kind[WriteStage.kind][1].totals else None,
        context_uses=_context_uses(*by_kind[SurveyStage.kind]) if SurveyStage.kind in by_kind else None,
        code_counts=_code_counts(stages),
    )
    try:
        record = read_dataset(dataset_dir)
        shards = list(read_shards(dataset_dir, record.num_shards))
    except ConfigError:
        # Not written yet, or moved: the page is of the run then.
        record, shards = None, []
    return Facts(
        name=config.name, dataset_dir=dataset_dir, record=record, shards=shards, run=run, models=models, decode=decode
    )


@dataclass
class _Noted:
    """Sums of what the commit records of all stages have for the page.

    ``measures`` are of all shards, and None of a run of an older version, which has noted none. Beside each of the
    ``voices``, the name of its group and its embedding, stands the unit and the place among those of the unit.
    """

    measures: CutMeasures | None = field(default_factory=CutMeasures)
    voices: list[tuple[tuple[int, int], tuple[str, np.ndarray]]] = field(default_factory=list)

    def add(self, kind: str, commit: Commit) -> None:
        if kind == WriteStage.kind and self.measures is not None:
            if "cuts" in commit.stats:
                self.measures.add(CutMeasures.unpack(commit.stats["cuts"]))
            else:
                self.measures = None
        if kind == MatchStage.kind:
            try:
                noted = msgspec.convert(commit.stats.get("voices", []), list[tuple[Any, str]])
                found = [(shorten(str(group)), unpack_voice(text)) for group, text in noted]
                lengths = {len(embedding) for _, embedding in (*(one for _, one in self.voices[:1]), *found)}
                if len(lengths) > 1:
                    raise ValueError("embeddings of other lengths")
            except ValueError as error:
                message = f"the voices that a commit of match notes are damaged: {error}"
                raise ConfigError(message, code="damaged_run_dir") from error
            self.voices += [((commit.index, number), one) for number, one in enumerate(found)]


def _read_stage(stage: Stage, noted: _Noted) -> StageFacts:
    """Return the facts of a stage, and add what its commits have noted; one of these at a time is held in memory."""
    if not stage.dir.units.exists():
        return StageFacts(name=stage.name, cost_unit=stage.cost_unit, counts=stage.counts, totals=None)
    ids, costs = dict[int, str](), dict[int, float]()
    for unit in iterate_plan(stage):
        ids[unit.index], costs[unit.index] = unit.id, unit.cost
    num_units = len(ids)
    cost: defaultdict[int, float] = defaultdict(float)
    seconds: defaultdict[int, float] = defaultdict(float)
    devices: set[str] = set()
    hosts: set[str] = set()
    memory, asked = 0.0, math.inf
    for commit in iterate_ledger(stage.dir, ids):
        # The first one of a unit counts.
        del ids[commit.index]
        cost[commit.rank] += costs[commit.index]
        seconds[commit.rank] += commit.seconds
        devices.add(commit.device_kind)
        hosts.add(commit.host)
        memory = max(memory, commit.memory_mb)
        asked = min(asked, commit.memory_asked_mb or math.inf)
        noted.add(stage.kind, commit)
    totals = read_totals(stage)
    return StageFacts(
        name=stage.name,
        cost_unit=stage.cost_unit,
        counts=stage.counts,
        totals=totals,
        num_units=num_units,
        num_done=num_units - len(ids),
        cost_by_rank=dict(sorted(cost.items())),
        seconds_by_rank=dict(sorted(seconds.items())),
        devices=sorted(devices - {""}),
        num_hosts=len(hosts - {""}),
        memory_mb=memory,
        memory_asked_mb=0.0 if math.isinf(asked) else asked,
        identity=decode_stored(stage.dir.identity, read_stored(stage.dir.identity), dict[str, Any]),
        examples=_examples(stage.dir.rejects, totals.rejects) if totals and totals.rejects else {},
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


class _Reject(msgspec.Struct):
    reason: str
    detail: str
    record: Any = None


def _examples(path: Path, reasons: dict[str, int]) -> dict[str, list[RejectExample]]:
    """Return the first rejects of each reason."""
    wanted = Counter({reason: min(count, _EXAMPLES) for reason, count in reasons.items()})
    found: dict[str, list[RejectExample]] = {reason: [] for reason in reasons}
    for number, line in enumerate(read_stored_lines(path)):
        reject = decode_stored(path, line, _Reject)
        if wanted[reject.reason] > 0:
            wanted[reject.reason] -= 1
            record = reject.record
            name = record.get("audio_filepath", record) if isinstance(record, dict) else record
            found[reject.reason].append(RejectExample(shorten(reject.detail), shorten(str(name))))
        if number == _LINES_SEARCHED or not any(count > 0 for count in wanted.values()):
            break
    return found


def _code_counts(stages: Sequence[Stage]) -> dict[str, np.ndarray]:
    """Return the counts of the codes of each codec whose encoding is finished, where they were counted."""
    finished = [stage for stage in stages if isinstance(stage, EncodeStage) and encoded_file(stage.dir).exists()]
    counts = {stage.codec_config.name: read_counts(stage.dir) for stage in finished}
    return {name: found for name, found in counts.items() if found is not None}


def _context_uses(stage: Stage, facts: StageFacts) -> np.ndarray | None:
    """Return how often each segment serves as context; None where that is not known, or there are no contexts."""
    if facts.totals is None or not isinstance(stage, SurveyStage) or len(numbers := stage.numbers()) < 2:
        return None
    uses = np.bincount(numbers[1])
    return uses[uses > 0]
