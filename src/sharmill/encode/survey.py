"""Stage ``survey``: a list of the unique segments of a dataset's stored audio, which serves all codecs.

It reads every audio file once, so that a dataset needs nothing but its files: whoever wrote it, however it has grown.

A place is an item of an audio field of a shard. Places are numbered through the dataset: all targets in the order of
the shards, then all contexts. Places with the same bytes hold one segment, whose owner is the first of them. Segments
are numbered in the order in which they are encoded: by place, except that neighbours are sorted by length.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import xxhash

from sharmill.config import Config
from sharmill.encode.config import EncodeConfig
from sharmill.engine.hashes import find_first
from sharmill.engine.stage import (
    Advance,
    Commit,
    Output,
    Processor,
    Stage,
    StageDir,
    Totals,
    Unit,
    add_up,
    make_unit,
    versions,
)
from sharmill.errors import ConfigError, UnitFailed
from sharmill.files.arrays import load_stored_array, save_array, write_array
from sharmill.files.atomic import open_atomic
from sharmill.files.checksums import checksum
from sharmill.files.staging import Staging
from sharmill.files.stored import load_record
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import CUTS
from sharmill.shar.items import ItemTable
from sharmill.shar.json_lines import read_cut_ids

_MAX_UINT32 = (1 << 32) - 1

# The place of an item's data in its file, and facts from its metadata.
PLACE: Final = np.dtype(
    [("hash", "<u8", 2), ("offset", "<i8"), ("size", "<i8"), ("num_samples", "<u4"), ("sampling_rate", "<u4")]
)
# The owner of a segment: ``field`` counts the audio fields of the dataset.
SEGMENT: Final = np.dtype([("place", PLACE), ("shard", "<u4"), ("field", "<u4")])

# Segments that are sorted by length together: enough for batches of equal lengths, few enough for a shard's segments
# to stay near each other.
_WINDOW: Final = 1 << 15


def hash_segment(data: bytes | memoryview, num_samples: int, sampling_rate: int) -> tuple[int, int]:
    """Return the two halves of the xxh3-128 of stored audio; other metadata make another segment of the same bytes."""
    digest = xxhash.xxh3_128_intdigest(data, seed=sampling_rate << 32 | num_samples)
    return digest >> 64, digest & 0xFFFFFFFFFFFFFFFF


def seconds_of(segments: np.ndarray) -> np.ndarray:
    """Return the durations of segments in seconds, float64."""
    return np.asarray(segments["place"]["num_samples"] / segments["place"]["sampling_rate"])


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
        if load_record(stage.identity, dict[str, Any]).get("input") != self.dataset.audio_checksum():
            raise ConfigError(f"the dataset has changed since {name}: run that again", code="stage_not_run")

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
            yield make_unit(
                shard.index, cost=round(shard.target_seconds + shard.context_seconds, 3), size=shard.count,
                params={"files": {file.file: file.xxh3 for file in files}},
            )  # fmt: skip

    def open(self, device: str) -> Processor:
        return SurveyProcessor(self.dataset.directory)

    def finalize(self, units: list[Unit], commits: list[Commit]) -> Totals:
        shape = len(self.dataset.record().audio_fields), sum(commit.num_out for commit in commits)
        merge_tables(
            [self.root / commit.files[0].name for commit in commits], shape, self.segments_file, self.numbers_file
        )
        return add_up(commits)

    def products(self) -> list[Path]:
        return [self.segments_file, self.numbers_file]


def merge_tables(
    tables: list[Path], shape: tuple[int, int], segments_file: Path, numbers_file: Path, *, window: int = _WINDOW
) -> None:
    """Write the unique segments of a dataset, and their numbers at all places.

    Args:
        tables: for each shard an array (audio fields, cuts) of ``PLACE``.
        shape: numbers of audio fields and of cuts of the dataset.
        window: number of segments that are sorted by length together.
    """
    # Its name lasts with the fsync of the stage's folder that comes before done.json.
    segments_file.parent.mkdir(exist_ok=True)
    # Copies: a view would keep the whole table.
    parts = (table["hash"].copy() for _, _, table in _read_tables(tables, shape[0]))
    hashes = np.concatenate([np.empty((0, 2), np.uint64), *parts])
    # For each place the first place that has the same hash.
    owners = find_first(*hashes.T)
    del hashes
    count = int(np.count_nonzero(owners == np.arange(len(owners), dtype=np.uint32)))
    numbers = np.empty(len(owners), np.uint32)

    def number_segments() -> Iterator[np.ndarray]:
        number = 0
        for segments, places in _sorted_segments(_read_tables(tables, shape[0]), owners, window):
            numbers[places] = np.arange(number, number + len(places), dtype=np.uint32)
            number += len(places)
            yield segments

    with open_atomic(segments_file) as stream:
        write_array(stream, SEGMENT, (count,), number_segments())
    with open_atomic(numbers_file) as stream:
        write_array(stream, np.dtype("<u4"), shape, [numbers[owners]])


def _sorted_segments(
    tables: Iterable[tuple[int, int, np.ndarray]], owners: np.ndarray, window: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the segments, arrays of ``SEGMENT``, in the order of their numbers, and the places of their owners."""
    place = 0
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for shard, field, table in tables:
        here = np.arange(place, place + len(table), dtype=np.uint32)
        place += len(table)
        own = owners[here] == here
        segments = np.empty(int(own.sum()), SEGMENT)
        segments["place"], segments["shard"], segments["field"] = table[own], shard, field
        found.append((segments, here[own]))
        if sum(len(places) for _, places in found) >= window:
            yield _sort_by_length(found)
            found = []
    if found:
        yield _sort_by_length(found)


def _sort_by_length(found: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    segments, places = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(-seconds_of(segments), kind="stable")
    return segments[order], places[order]


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
        return Output(
            files=[name],
            num_out=unit.size,
            stats={"seconds": float((table[0]["num_samples"] / table[0]["sampling_rate"]).sum())},
        )


def _survey_file(path: Path, ids: list[str]) -> np.ndarray:
    """Return the ``PLACE`` records of an audio file, whose items belong to the cuts with these ids.

    Raises:
        UnitFailed, DamagedShard: they do not, or say too little of themselves.
    """
    table = np.empty(len(ids), PLACE)
    items = ItemTable(path, ids=ids)
    for number, cut_id in enumerate(ids):
        item = items.item(number)
        if item.data is None or item.metadata is None:
            raise UnitFailed(f"{path}: {cut_id} has no audio", code="damaged_shard")
        num_samples, rate = (item.metadata.get(key, 0) for key in ("num_samples", "sampling_rate"))
        if not all(isinstance(value, int) and 0 <= value <= _MAX_UINT32 for value in (num_samples, rate)) or not rate:
            raise UnitFailed(f"{path}: {cut_id} has no number of samples and rate", code="damaged_shard")
        offset, size = items.place(2 * number)
        table[number] = (hash_segment(item.data, num_samples, rate), offset, size, num_samples, rate)
    return table
