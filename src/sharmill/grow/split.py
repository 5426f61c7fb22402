"""Splitting of a finished dataset into train, valid and test sets that share no speakers.

The cuts of a shard go to different splits, so new shards are written, to which items are copied byte for byte.
Splitting is a stage, so the engine accounts for every cut and resumes an interrupted split.

Two speakers stay together if one has contexts from a recording of the other, as with ``speaker_key: all``. So audio
that is a context in one split is never a target in another.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from sharmill.engine.executor import Listener
from sharmill.engine.plan import committed_files
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import Advance, Processor, Publication, Stage, StageRun, identify_folder, versions
from sharmill.engine.unit import Output, Totals, Unit, add_up, make_unit
from sharmill.errors import ConfigError, DamagedShard, RejectRecord, refuse
from sharmill.executors.local import run_alone
from sharmill.files.arrays import map_stored_array, save_array
from sharmill.files.atomic import remove, remove_temp_files, write_new
from sharmill.files.checksums import checksum, checksum_bytes, hash_text
from sharmill.files.staging import Staging
from sharmill.files.stored import load_record
from sharmill.grow.join import SourceDataset, add_up_shards
from sharmill.manifest import parse_speaker_tag
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import CUTS, DATASET_FILE, SHARDS_FILE
from sharmill.shar.index import DatasetRecord, ShardRecord, read_dataset, write_dataset, write_shards
from sharmill.shar.items import FieldWriter, ItemTable, open_items
from sharmill.shar.json_lines import decode_line, read_cut_ids, read_json_lines, write_cut_lines
from sharmill.shar.reading.shard_source import open_shard_source
from sharmill.sources.lhotse_lines import Cut
from sharmill.sources.speakers import is_missing
from sharmill.stages.fields import shard_record

_decoder = msgspec.json.Decoder(Cut)


@dataclass(frozen=True)
class SpeakerTable:
    """The speakers of all cuts, and the groups of speakers that stay together.

    Attributes:
        speakers: the name of each speaker, made from the dataset and the speaker in the tag.
        groups: the group of each speaker, (speakers,); a group's number is the index of its first speaker.
        speaker_of: the index of the speaker of each cut, (cuts,), in the order of the dataset.
        seconds: the duration of each cut in seconds, (cuts,).
    """

    speakers: list[str]
    groups: np.ndarray
    speaker_of: np.ndarray
    seconds: np.ndarray

    @classmethod
    def read(cls, part: SourceDataset, is_kept: np.ndarray | None = None) -> "SpeakerTable":
        """Read the speakers of all cuts of a dataset, or only of the cuts that a mask (cuts,) keeps.

        Raises:
            ConfigError: a cut has no speaker.
            DamagedShard: a file of cuts cannot be read.
        """
        numbers: dict[str, int] = {}
        kinds = [("speaker", "i8"), ("seconds", "f8"), ("own", "u8"), ("other", "u8")]
        parts = [np.zeros(0, kinds)]
        count = 0
        for shard in part.shards:
            path = part.directory / shard.fields[CUTS].file
            lines = read_json_lines(path)
            if len(lines) != shard.count:
                raise DamagedShard(f"{path}: {len(lines)} cuts instead of {shard.count}")
            rows = []
            first, count = count, count + len(lines)
            for line in lines if is_kept is None else compress(lines, is_kept[first:count]):
                cut = decode_line(path, line, _decoder)
                supervision = cut.supervisions[0] if cut.supervisions else None
                speaker = supervision.speaker if supervision else None
                number = numbers.setdefault(_speaker(cut.id, speaker), len(numbers))
                context = (supervision.custom or {}).get("context_recording_id") if supervision else None
                own = hash_text(cut.recording.id) if cut.recording else 0
                rows.append((number, cut.duration, own, hash_text(str(context)) if context else 0))
            parts.append(np.array(rows, kinds))
        columns = np.concatenate(parts)
        return cls(
            list(numbers),
            _unite(len(numbers), columns["speaker"], columns["own"], columns["other"]),
            columns["speaker"].astype(np.int32),
            columns["seconds"].copy(),
        )

    def assign(self, shares: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
        """Return the indices of the cuts of each split, in order; ``train`` gets the remaining cuts.

        Groups are tried in an order that depends on their names and the seed. A split takes every group that brings it
        closer to its share of the seconds.

        Args:
            shares: the share of all seconds for each split except ``train``.

        Raises:
            ConfigError: there are fewer groups than splits.
        """
        members = np.unique(self.groups)
        if len(members) <= len(shares):
            apart = len(members) < len(self.speakers)
            raise ConfigError(
                f"{len(shares) + 1} splits need as many speakers, but the dataset has {len(members)}"
                + (f" groups of its {len(self.speakers)} speakers: speakers stay together if one has contexts from "
                   "recordings of the other" if apart else ""),
                code="too_few_speakers",
            )  # fmt: skip
        group_of = self.groups[self.speaker_of]
        seconds = np.bincount(group_of, weights=self.seconds, minlength=len(self.speakers))
        left = sorted(members.tolist(), key=lambda group: (hash_text(f"{seed}\n{self.speakers[group]}"), group))
        result = {}
        for number, (split, share) in enumerate(shares.items()):
            chosen = _fill(left, seconds, share * float(seconds.sum()), num_kept=len(shares) - number)
            left = [group for group in left if group not in chosen]
            result[split] = np.flatnonzero(np.isin(group_of, sorted(chosen)))
        return {"train": np.flatnonzero(np.isin(group_of, left))} | result


def _fill(groups: Sequence[int], seconds: np.ndarray, wanted: float, *, num_kept: int) -> set[int]:
    """Choose groups of about ``wanted`` seconds for a split: at least one, leaving at least ``num_kept`` groups."""
    chosen: set[int] = set()
    have = 0.0
    for group in groups:
        if len(groups) - len(chosen) == num_kept:
            break
        if abs(have + seconds[group] - wanted) < abs(have - wanted):
            chosen.add(group)
            have += seconds[group]
    return chosen or {min(groups, key=lambda group: seconds[group])}


def _unite(num_speakers: int, speakers: np.ndarray, own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the group of each speaker (speakers,). Two speakers are united if one has contexts from the other's
    recordings.

    ``own`` and ``other`` are the hashes of the recording ids of each cut and its context, (cuts,); 0 means none.
    """
    groups = np.arange(num_speakers)
    owners = np.unique(np.stack([own, speakers.astype(np.uint64)], axis=1), axis=0)
    users = np.unique(np.stack([other, speakers.astype(np.uint64)], axis=1), axis=0)
    first = np.searchsorted(owners[:, 0], users[:, 0], side="left")
    last = np.searchsorted(owners[:, 0], users[:, 0], side="right")
    for (_, user), start, stop in zip(users.tolist(), first.tolist(), last.tolist(), strict=True):
        for owner in owners[start:stop, 1].tolist():
            left, right = sorted((int(groups[user]), int(groups[owner])))
            if left != right:
                groups[groups == right] = left
    return groups


def _speaker(cut_id: str, speaker: str | int | None) -> str:
    """Return the name of a speaker without the rest of the tag, so that a speaker of two languages counts once."""
    try:
        tag = parse_speaker_tag(str(speaker or ""))
    except RejectRecord:
        name = None if is_missing(speaker) else str(speaker)
    else:
        name = None if is_missing(tag.speaker) else f"{tag.dataset} {tag.speaker}"
    if not name:
        raise ConfigError(
            f"the cut {cut_id} has no speaker, so the dataset cannot be split by speaker; add a speaker to every "
            "record",
            code="no_speaker",
        )
    return name


@dataclass(frozen=True)
class Split:
    """One of the datasets made by a split, and its number of speakers."""

    name: str
    record: DatasetRecord
    num_speakers: int


def split_dataset(
    dataset: str | Path, out: str | Path, shares: Mapping[str, float], *, seed: int = 42, shard_size: int | None = None,
    where: str = "", workers: int | Literal["auto"] = "auto", listener: Listener | None = None, restart: bool = False,
) -> list[Split]:  # fmt: skip
    """Divide a dataset into ``out/train``, ``out/valid`` and so on, such that no two have a speaker in common.

    Args:
        shares: the names of the splits besides ``train``, each with its share of all seconds.
        seed: seed for the choice of speakers; the same seed gives the same bytes.
        shard_size: the number of cuts per shard; by default as in the dataset.
        where: conditions that cuts must meet, as in ``open_shar``; other cuts are in no split.
        restart: discard what an interrupted split has left, instead of resuming it.

    Raises:
        ConfigError: the dataset does not exist, has too few speakers or cuts without one, or ``out`` is not empty.
        FatalError: shards could not be written: a file of the dataset is damaged, or the disk is full.

    Example:
        >>> split_dataset("data/speech", "data/splits", {"valid": 0.01})  # doctest: +SKIP
    """
    refuse(
        *(
            (
                not 0 < share < 1 or sum(shares.values()) >= 1,
                f"the share of {name} is {share:g}: shares must be between 0 and 1, and their sum below 1",
            )
            for name, share in shares.items()
        ),
        code="bad_usage",
    )
    stage = SplitStage(Path(dataset), Path(out).absolute(), dict(shares), seed=seed, shard_size=shard_size, where=where)
    run_dir = RunDir(stage.out.with_name(f".{stage.out.name}.split"))
    with run_alone(stage, run_dir, workers=workers, listener=listener, restart=restart) as (run, _):
        speakers = load_record(run.plan_folder / "speakers.json", dict[str, int])
        return [Split(name, read_dataset(stage.out / name), count) for name, count in speakers.items()]


class SplitStage(Stage):
    """The stage that writes the splits. One unit is one shard of a split. Its run directory is beside ``out``."""

    kind = "split"

    def __init__(
        self, dataset: Path, out: Path, shares: dict[str, float], *, seed: int, shard_size: int | None, where: str
    ) -> None:
        self.out = out
        self.part = SourceDataset.read(dataset)
        if out.resolve().is_relative_to(dataset.resolve()):
            raise ConfigError(f"{out} is inside the dataset: choose another folder", code="bad_usage")
        self.shares = shares
        self.seed = seed
        self.where = where
        # Open the dataset before any work, so that unusable conditions are refused.
        self._cuts = open_shard_source(dataset, [], None, where=where) if where else None
        self.shard_size = shard_size or max((shard.count for shard in self.part.shards), default=1)

    def publication(self, run: StageRun) -> "SplitPublication":
        return SplitPublication(run, self.out, ["train", *self.shares], self.part.record.fields)

    def identity(self, run: StageRun) -> dict[str, Any]:
        return {
            "dataset": identify_folder(self.part.directory, run.run_dir.path),
            "input": checksum_bytes(msgspec.json.encode([self.part.record, self.part.shards])),
            "shares": self.shares,
            "seed": self.seed,
            **({"where": self.where} if self.where else {}),
            "shard_size": self.shard_size,
            "versions": versions(),
        }

    def plan(self, run: StageRun) -> Iterator[Unit]:
        is_kept = self._find_kept()
        table, kept = SpeakerTable.read(self.part, is_kept), np.flatnonzero(is_kept)
        splits = table.assign(self.shares, self.seed)
        write_new(run.plan_folder / "speakers.json", msgspec.json.encode(
            {name: len(np.unique(table.speaker_of[cuts])) for name, cuts in splits.items()}
        ))  # fmt: skip
        index = 0
        for name, cuts in splits.items():
            save_array(run.plan_folder / f"{name}.npy", kept[cuts])
            for shard, start in enumerate(range(0, len(cuts), self.shard_size)):
                chosen = cuts[start : start + self.shard_size]
                yield make_unit(
                    index, cost=round(float(table.seconds[chosen].sum()), 3), size=len(chosen),
                    params={"split": name, "shard": shard, "start": start, "stop": start + len(chosen)},
                )  # fmt: skip
                index += 1

    def _find_kept(self) -> np.ndarray:
        """Return a mask (cuts,) of the cuts that meet the conditions, in the order of the dataset."""
        counts = [shard.count for shard in self.part.shards]
        if self._cuts is None:
            return np.ones(sum(counts), bool)
        shards = (self._cuts.open(number, 0) for number in range(len(counts)))
        meets = (shard.read(item, ()) is not None
                 for shard, count in zip(shards, counts, strict=True) for item in range(count))  # fmt: skip
        return np.fromiter(meets, bool)

    def open(self, run: StageRun, device: str) -> Processor:
        return SplitProcessor(self.part, run.plan_folder)

    def finalize(self, run: StageRun) -> Totals:
        shards: dict[str, list[ShardRecord]] = {name: [] for name in ("train", *self.shares)}
        for unit, commit in zip(run.units, run.commits, strict=True):
            name, shard = unit.params["split"], unit.params["shard"]
            shards[name].append(shard_record(commit, self.part.record.layout, shard, f"{name}/"))
        for name, records in shards.items():
            record = msgspec.structs.replace(self.part.record, name=f"{self.part.record.name}_{name}")
            remove_temp_files(self.out / name, {SHARDS_FILE, DATASET_FILE})
            write_shards(self.out / name, records)
            write_dataset(self.out / name, add_up_shards(record, records))
        return add_up(run.commits)


class SplitPublication(Publication):
    """The folder of the splits, with a dataset for each."""

    def __init__(self, run: StageRun, out: Path, splits: Sequence[str], fields: Sequence[str]) -> None:
        super().__init__(out)
        self._run = run
        self._folders = [f"{name}/{field}" for name in splits for field in fields]
        self._index = [out / name / file for name in splits for file in (SHARDS_FILE, DATASET_FILE)]

    def folders(self) -> list[str]:
        return self._folders

    def is_complete(self) -> bool:
        return all(path.exists() for path in self._index)

    def discard(self) -> None:
        remove(*self._index, *(self.root / file.name for file in committed_files(self._run)))

    def check_output(self) -> None:
        """Raise ConfigError if the folder contains files that this split has not written."""
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"{self.root} is not a folder", code="foreign_output")
        if ShardedDataset(self.root).is_empty():
            return
        own = {self.root / file.name: file.xxh3 for file in committed_files(self._run)}
        # Ignore the engine's files.
        files = (path for path in self.root.rglob("*") if not str(path).startswith(f"{self.root}/.sharmill"))
        found = {path for path in files if not path.is_dir()}
        # An index is only written after all other files.
        unknown = found.difference(own, self._index if found.issuperset(own) else ())
        replaced = (path for path in found & own.keys() if not path.is_file() or checksum(path) != own[path])
        if not own or unknown or any(replaced):
            raise ConfigError(
                f"{self.root} is not empty: choose another folder, or empty it yourself", code="foreign_output"
            )


class SplitProcessor(Processor):
    """Writes shards whose items are copied from other shards.

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
        # Publish the cuts last.
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
        return Output(
            files=list(files.values()),
            num_out=len(lines[CUTS]),
            stats=dict(zip(("seconds", "context_seconds"), seconds.values(), strict=True)),
        )

    def _copy(
        self, shard: ShardRecord, numbers: list[int], writers: Mapping[str, FieldWriter],
        lines: Mapping[str, list[bytes]], seconds: dict[str, float],
    ) -> None:  # fmt: skip
        """Copy the cuts at these indices of a shard to ``writers`` and ``lines``; add their audio to ``seconds``."""
        path = self._part.path(shard, CUTS)
        stored, ids = read_json_lines(path), list(read_cut_ids(path))
        lines[CUTS].extend(stored[number] for number in numbers)
        for field in (*writers, *(name for name in lines if name != CUTS)):
            table = open_items(self._part.path(shard, field), ids)
            for number in numbers:
                if isinstance(table, ItemTable):
                    writers[field].copy(table, number)
                else:
                    lines[field].append(table.line(number))
                if field in seconds:
                    seconds[field] += (table.item(number).metadata or {}).get("duration", 0.0)
