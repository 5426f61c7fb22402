"""Stage ``survey``: a list of the unique segments of a dataset's stored audio, which serves all codecs.

It reads every audio file once, so that a dataset needs nothing but its files: whoever wrote it, however it has grown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from sharmill.config import Config
from sharmill.encode.config import EncodeConfig
from sharmill.encode.segments import PLACE, SEGMENT, SegmentNumbers, hash_segment, seconds_of
from sharmill.engine.hashes import find_first
from sharmill.engine.identity import versions
from sharmill.engine.rundir import StageDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import ConfigError, UnitFailed
from sharmill.files.staging import Staging
from sharmill.files.storage import checksum, open_atomic
from sharmill.files.stored import (
    decode_stored,
    load_stored_array,
    map_stored_array,
    read_stored,
    save_array,
    write_array,
)
from sharmill.shar.cut_lines import read_cut_ids
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.items import ItemTable
from sharmill.shar.layout import CUTS

_MAX_UINT32 = (1 << 32) - 1


class SurveyStage(Stage):
    """The stage that lists the unique segments of a dataset in the run directory. One unit is one shard."""

    kind: ClassVar[str] = "survey"
    after: ClassVar = ("write",)
    part_of: ClassVar[str] = "encode"
    # It costs no more than reading the audio.
    replan_when_changed: ClassVar[bool] = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.dataset = ShardedDataset(Path(config.dataset_dir))

    @classmethod
    def of(cls, config: Config) -> list[Self]:
        return [cls(config)] if config.section(EncodeConfig).codecs else []

    @property
    def segments_file(self) -> Path:
        """The unique segments: an array (segments,) of ``SEGMENT``."""
        return self.dir.merged / "segments.npy"

    @property
    def numbers_file(self) -> Path:
        """The numbers of the segments at all places: an array (audio fields, cuts of the dataset) uint32."""
        return self.dir.merged / "numbers.npy"

    def require_done(self, stage: StageDir) -> None:
        """Raise ConfigError where a stage of codes is not finished, or was finished with other audio."""
        name = stage.path.relative_to(self.run_dir.path).as_posix()
        if not stage.done.exists():
            raise ConfigError(f"{name} is not finished: run it first", code="stage_not_run")
        identity = decode_stored(stage.identity, read_stored(stage.identity), dict[str, Any])
        if identity.get("input") != self.dataset.audio_checksum():
            raise ConfigError(f"the dataset has changed since {name}: run that again", code="stage_not_run")

    def segments(self) -> np.ndarray:
        """Open the array of the finished stage that has the unique segments."""
        return map_stored_array(self.segments_file)

    def seconds(self) -> np.ndarray:
        """Return the durations (segments,) float64 of the unique segments of the finished stage."""
        return seconds_of(self.segments())

    def numbers(self) -> np.ndarray:
        """Open the array of the finished stage that has the numbers of the segments at all places."""
        return map_stored_array(self.numbers_file)

    def audio_files(self) -> list[list[Path]]:
        """Return for each shard its files of audio."""
        fields = self.dataset.record().audio_fields
        return [
            [self.dataset.directory / shard.fields[field].file for field in fields] for shard in self.dataset.shards()
        ]

    def identity(self) -> dict[str, Any]:
        return {"input": self.dataset.audio_checksum(), "versions": versions()}

    def plan(self, folder: Path) -> Iterator[Unit]:
        fields = (CUTS, *self.dataset.record().audio_fields)
        for shard in self.dataset.shards():
            files = [shard.fields[field] for field in fields]
            cost = round(shard.target_seconds + shard.context_seconds, 3)
            params = {"files": {file.file: file.xxh3 for file in files}}
            yield make_unit(shard.index, cost=cost, size=shard.count, params=params)

    def open(self, device: str) -> Processor:
        return SurveyProcessor(self.dataset.directory)

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        tables = [self.root / commit.files[0].name for commit in commits]
        num_fields = len(self.dataset.record().audio_fields)
        shape = num_fields, sum(commit.num_out for commit in commits)
        merge_tables(tables, shape, self.segments_file, self.numbers_file)
        return add_up(commits)

    def products(self) -> list[Path]:
        return [self.segments_file, self.numbers_file]


def merge_tables(tables: list[Path], shape: tuple[int, int], segments_file: Path, numbers_file: Path) -> None:
    """Write the unique segments of a dataset, and their numbers at all places.

    Args:
        tables: for each shard an array (audio fields, cuts) of ``PLACE``.
        shape: numbers of audio fields and of cuts of the dataset.
    """
    num_fields = shape[0]
    # Its name lasts with the fsync of the stage's folder that comes before done.json.
    segments_file.parent.mkdir(exist_ok=True)
    # Copies: a view would keep the whole table.
    parts = (table["hash"].copy() for _, _, table in _read_tables(tables, num_fields))
    hashes = np.concatenate([np.empty((0, 2), np.uint64), *parts])
    numbers = SegmentNumbers(find_first(*hashes.T))
    del hashes
    with open_atomic(segments_file) as stream:
        write_array(stream, SEGMENT, (numbers.count(),), numbers.sort(_read_tables(tables, num_fields)))
    with open_atomic(numbers_file) as stream:
        write_array(stream, np.dtype("<u4"), shape, [numbers.of_places()])


def _read_tables(paths: list[Path], num_fields: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield shard, field and the ``PLACE`` records of every file of audio, in the order of the places."""
    for field in range(num_fields):
        for shard, path in enumerate(paths):
            yield shard, field, load_stored_array(path)[field]


class SurveyProcessor(Processor):
    """The survey of shards in one rank."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        for file, expected in unit.params["files"].items():
            # Damaged audio would give codes as well.
            if checksum(self._directory / file) != expected:
                raise UnitFailed(
                    f"{self._directory / file} has changed since it was written: remove it and run the stage write "
                    "again",
                    code="damaged_shard",
                )
        cuts, *audio = [self._directory / file for file in unit.params["files"]]
        ids = list(read_cut_ids(cuts))
        if len(ids) != unit.size:
            raise UnitFailed(f"{cuts} has {len(ids)} cuts instead of {unit.size}", code="damaged_shard")
        table = np.stack([_survey_file(path, ids) for path in audio])
        name = f"parts/{unit.index:06d}.npy"
        save_array(staging.path(name), table)
        seconds = float((table[0]["num_samples"] / table[0]["sampling_rate"]).sum())
        return Output(files=[name], num_out=unit.size, stats={"seconds": seconds})


def _survey_file(path: Path, ids: list[str]) -> np.ndarray:
    """Return the ``PLACE`` records of an audio file, whose items belong to the cuts with these ids.

    Raises:
        UnitFailed, DamagedShard: they do not, or say too little of themselves.
    """
    table = np.empty(len(ids), PLACE)
    items = ItemTable(path)
    try:
        if len(items) != len(ids):
            raise UnitFailed(f"{path} has {len(items)} items instead of {len(ids)}", code="damaged_shard")
        for number, cut_id in enumerate(ids):
            item = items.item(number)
            if item.cut_id != cut_id:
                raise UnitFailed(f"{path}: item {number} is {item.cut_id!r}, not {cut_id!r}", code="damaged_shard")
            if item.data is None or item.metadata is None:
                raise UnitFailed(f"{path}: {cut_id} has no audio", code="damaged_shard")
            num_samples, rate = _length(item.metadata)
            if not rate:
                raise UnitFailed(f"{path}: {cut_id} has no number of samples and rate", code="damaged_shard")
            offset, size = items.place(number)
            table[number] = (hash_segment(item.data, num_samples, rate), offset, size, num_samples, rate)
    finally:
        items.close()
    return table


def _length(recording: dict[str, Any]) -> tuple[int, int]:
    """Return samples and rate of the audio that a Recording describes; zeros where it does not say them."""
    length = recording.get("num_samples", 0), recording.get("sampling_rate", 0)
    return length if all(isinstance(value, int) and 0 <= value <= _MAX_UINT32 for value in length) else (0, 0)
