"""Splits of a finished dataset: train, valid and test without common speakers.

The cuts of a shard are divided, so new shards are written; their members are copied byte for byte. This is a stage of
its own, so that the engine keeps the accounts, and a split that was interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from sharmill.engine.identity import identify_folder, versions
from sharmill.engine.ledger import committed_files
from sharmill.engine.listener import Listener
from sharmill.engine.run import locked, reserved, run_stage
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import ConfigError, DamagedShard, FatalError
from sharmill.executors.local import LocalExecutor
from sharmill.files.staging import Staging
from sharmill.files.storage import (
    checksum,
    checksum_bytes,
    disk_errors,
    refuse_strangers,
    remove_asides,
    remove_at_once,
    remove_for_good,
    remove_if_empty,
)
from sharmill.files.stored import decode_stored, map_stored_array, read_stored, save_array
from sharmill.grow.parts import SourceDataset
from sharmill.grow.placing import add_up_shards
from sharmill.grow.speakers import SpeakerTable
from sharmill.shar.cut_lines import read_cut_ids, read_lines, write_cut_lines
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.index import DatasetRecord, FieldFile, ShardRecord, write_dataset, write_shards
from sharmill.shar.items import FieldWriter, ItemTable, open_items
from sharmill.shar.layout import CUTS, DATASET_FILE, SHARDS_FILE


@dataclass(frozen=True)
class Split:
    """One of the datasets that were made, and how many speakers it has."""

    name: str
    record: DatasetRecord
    num_speakers: int


def split_dataset(
    dataset: str | Path, out: str | Path, shares: Mapping[str, float], *, seed: int = 42, shard_size: int | None = None,
    workers: int | Literal["auto"] = "auto", listener: Listener | None = None, restart: bool = False,
) -> list[Split]:  # fmt: skip
    """Divide a dataset into ``out/train``, ``out/valid`` and so on, so that no two have a speaker in common.

    Args:
        shares: names of the splits beside ``train``, with the share of all seconds that each should have.
        seed: makes the choice of speakers; the same seed makes the same bytes.
        shard_size: cuts of a shard; by default as in the dataset.
        restart: discard what an interrupted split has left, instead of going on.

    Raises:
        ConfigError: there is no dataset, it has too few speakers or cuts without one, or ``out`` is not empty.
        FatalError: shards could not be written: a file of the dataset is damaged, or the disk is full.

    Example:
        >>> split_dataset("data/speech", "data/splits", {"valid": 0.01})  # doctest: +SKIP
    """
    for name, share in shares.items():
        if not 0 < share < 1 or sum(shares.values()) >= 1:
            raise ConfigError(
                f"the share of {name} is {share:g}: shares lie between 0 and 1, and leave something for train",
                code="bad_usage",
            )
    stage = SplitStage(Path(dataset), Path(out).absolute(), dict(shares), seed=seed, shard_size=shard_size)
    run_dir = stage.run_dir
    refuse_strangers(run_dir.path.parent, [run_dir.path])
    try:
        with disk_errors(run_dir.path), locked(run_dir):
            try:
                with reserved(run_dir, [stage], restart=restart):
                    splits = _run(stage, LocalExecutor(workers), listener or Listener(), restart=restart)
                # At once, so that no later split takes what a killed process has left of it for a state to go on from.
                remove_at_once(stage.dir.path)
            finally:
                if not stage.dir.token_file.exists():
                    # It is finished, or nothing was begun.
                    remove_asides(run_dir.path, {stage.dir.path.name})
                    for path in (run_dir.id, run_dir.reserved):
                        path.unlink(missing_ok=True)
                    remove_if_empty(stage.dir.path)
    finally:
        remove_if_empty(run_dir.path)
    return splits


def _run(stage: SplitStage, executor: LocalExecutor, listener: Listener, *, restart: bool) -> list[Split]:
    result = run_stage(stage, executor, listener, max_reject_fraction=0.0, restart=restart)
    if not result.ok:
        reasons = "; ".join(dict.fromkeys(error.message for error in result.failures.values()))
        raise FatalError(f"{stage.root} is not finished: {reasons}", code="units_failed")
    return stage.splits()


class SplitStage(Stage):
    """The stage that writes the splits. One unit is one of their shards. Its run directory lies beside ``out``."""

    kind: ClassVar[str] = "split"

    def __init__(
        self, dataset: Path, out: Path, shares: dict[str, float], *, seed: int, shard_size: int | None
    ) -> None:
        self.run_dir = RunDir(out.with_name(f".{out.name}.split"))
        self.root = out
        self.part = SourceDataset.read(dataset)
        if out.resolve().is_relative_to(dataset.resolve()):
            raise ConfigError(f"{out} lies in the dataset itself: choose another place", code="bad_usage")
        self.shares = shares
        self.seed = seed
        self.shard_size = shard_size or max((shard.count for shard in self.part.shards), default=1)
        self.folders = [f"{name}/{field}" for name in ("train", *shares) for field in self.part.record.fields]

    def identity(self) -> dict[str, Any]:
        return {
            "dataset": identify_folder(self.part.directory, self.run_dir.path),
            "input": checksum_bytes(msgspec.json.encode([self.part.record, self.part.shards])),
            "shares": self.shares,
            "seed": self.seed,
            "shard_size": self.shard_size,
            "versions": versions(),
        }

    def plan(self, folder: Path) -> Iterator[Unit]:
        table = SpeakerTable.read(self.part)
        splits = table.assign(self.shares, self.seed)
        speakers = {name: table.count_speakers(cuts) for name, cuts in splits.items()}
        (folder / "speakers.json").write_bytes(msgspec.json.encode(speakers))
        index = 0
        for name, cuts in splits.items():
            save_array(folder / f"{name}.npy", cuts)
            for shard, start in enumerate(range(0, len(cuts), self.shard_size)):
                chosen = cuts[start : start + self.shard_size]
                params = {"split": name, "shard": shard, "start": start, "stop": start + len(chosen)}
                cost = round(float(table.seconds[chosen].sum()), 3)
                yield make_unit(index, cost=cost, size=len(chosen), params=params)
                index += 1

    def open(self, device: str) -> Processor:
        return SplitProcessor(self.part, self.dir.plan)

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        shards: dict[str, list[ShardRecord]] = {name: [] for name in ("train", *self.shares)}
        for unit, commit in zip(units, commits, strict=True):
            shards[unit.params["split"]].append(self._shard_record(unit, commit))
        for name, records in shards.items():
            record = msgspec.structs.replace(self.part.record, name=f"{self.part.record.name}_{name}")
            remove_asides(self.root / name, {SHARDS_FILE, DATASET_FILE})
            write_shards(self.root / name, records)
            write_dataset(self.root / name, add_up_shards(record, records))
        return add_up(commits)

    def products(self) -> list[Path]:
        return [self.root / name / file for name in ("train", *self.shares) for file in (SHARDS_FILE, DATASET_FILE)]

    def discard(self) -> None:
        remove_for_good((*self.products(), *(self.root / file.name for file in committed_files(self))))

    def check_output(self) -> None:
        """Raise ConfigError where the folder holds what this split has not written."""
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"{self.root} is not a folder", code="foreign_output")
        if ShardedDataset(self.root).is_empty():
            return
        own = {self.root / file.name for file in committed_files(self)} if self.dir.token_file.exists() else set()
        found = next((path for name in self.root.iterdir() for path in _files(name) if path not in own), None)
        if not own or (found is not None and found not in self.products()):
            raise ConfigError(
                f"{self.root} is not empty: choose another place, or empty it yourself", code="foreign_output"
            )

    def splits(self) -> list[Split]:
        """Return what was made."""
        path = self.dir.plan / "speakers.json"
        speakers = decode_stored(path, read_stored(path), dict[str, int])
        return [Split(name, ShardedDataset(self.root / name).record(), count) for name, count in speakers.items()]

    def _shard_record(self, unit: Unit, commit: Commit) -> ShardRecord:
        prefix = f"{unit.params['split']}/"
        named = {file.name.removeprefix(prefix): file for file in commit.files}
        files = {field.name: named[field.path(unit.params["shard"])] for field in self.part.record.layout}
        return ShardRecord(
            index=unit.params["shard"],
            count=commit.num_out,
            target_seconds=round(commit.stats["seconds"], 3),
            context_seconds=round(commit.stats["context_seconds"], 3),
            fields={
                field: FieldFile(file.name.removeprefix(prefix), file.size, file.xxh3) for field, file in files.items()
            },
        )


def _files(path: Path) -> Iterator[Path]:
    """Yield the files below a folder of splits, without those of the engine."""
    if path.is_dir() and not path.name.startswith(".sharmill"):
        yield from (file for file in sorted(path.rglob("*")) if not file.is_dir())
    elif not path.is_dir():
        yield path


class SplitProcessor(Processor):
    """Writes shards of members of other shards.

    Args:
        plan: the folder of the stage's plan.
    """

    def __init__(self, part: SourceDataset, plan: Path) -> None:
        self._part = part
        self._plan = plan
        self._starts = np.cumsum([0, *(shard.count for shard in part.shards)])

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        name, shard = unit.params["split"], unit.params["shard"]
        cuts = map_stored_array(self._plan / f"{name}.npy")[unit.params["start"] : unit.params["stop"]]
        # The cuts last of all.
        layout = sorted(self._part.record.layout, key=lambda field: field.kind == "cuts")
        files = {field.name: f"{name}/{field.path(shard)}" for field in layout}
        lines: dict[str, list[bytes]] = {field.name: [] for field in layout if field.kind in ("cuts", "value")}
        seconds = dict.fromkeys(self._part.shards[0].seconds, 0.0)
        with ExitStack() as stack:
            writers = {
                field: stack.enter_context(FieldWriter(staging.path(file)))
                for field, file in files.items() if field not in lines
            }  # fmt: skip
            sources = np.searchsorted(self._starts, cuts, side="right") - 1
            for source in np.unique(sources).tolist():
                numbers = (cuts[sources == source] - self._starts[source]).tolist()
                self._copy(self._part.shards[source], numbers, writers, lines, seconds)
                advance(unit.cost * len(numbers) / unit.size)
        for field, copied in lines.items():
            write_cut_lines(staging.path(files[field]), copied)
        stats = dict(zip(("seconds", "context_seconds"), seconds.values(), strict=True))
        return Output(files=list(files.values()), num_out=len(lines[CUTS]), stats=stats)

    def _copy(
        self, shard: ShardRecord, numbers: list[int], writers: Mapping[str, FieldWriter],
        lines: Mapping[str, list[bytes]], seconds: dict[str, float],
    ) -> None:  # fmt: skip
        """Copy cuts of a shard to the writers and the lines of fields, and add up their seconds of audio."""
        path = self._checked(shard, CUTS)
        stored, ids = read_lines(path), list(read_cut_ids(path))
        lines[CUTS].extend(stored[number] for number in numbers)
        for field in (*writers, *(name for name in lines if name != CUTS)):
            with closing(open_items(self._checked(shard, field))) as table:
                if len(table) != len(ids):
                    raise table.damage(f"{len(table)} items for {len(ids)} cuts")
                for number in numbers:
                    if isinstance(table, ItemTable):
                        cut_id = writers[field].copy(table, number)
                    else:
                        cut_id = table.item(number).cut_id
                        lines[field].append(table.line(number))
                    if cut_id != ids[number]:
                        raise table.damage(f"item {number} is {cut_id!r}, the cut there is {ids[number]!r}")
                    if field in seconds:
                        seconds[field] += (table.item(number).metadata or {}).get("duration", 0.0)

    def _checked(self, shard: ShardRecord, field: str) -> Path:
        """Return the path of a file whose bytes are those that the index lists: damage is not to get a new checksum."""
        file = shard.fields[field]
        path = self._part.directory / file.file
        if not path.is_file() or checksum(path) != file.xxh3:
            raise DamagedShard(
                f"{path} is not what the index lists; sharmill validate {self._part.directory} tells all damage"
            )
        return path
