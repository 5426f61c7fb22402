"""The dataset that is checked: the shards that its index names or, without an intact index, those that lie there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar.index import CodecRecord, DatasetRecord, ShardRecord, read_dataset, read_shards
from sharmill.shar.layout import DATASET_FILE, SHARDS_FILE, codec_fields
from sharmill.shar.reading.foreign import find_shards
from sharmill.validate.findings import Finding

Read = TypeVar("Read")

_NO_SHARDS: Final = (
    f"sizes and checksums of the files: there is no readable {SHARDS_FILE}",
    "whether shards are missing at the end: nothing tells how many there should be",
)
_NO_DATASET: Final = (
    f"the limits of contexts, and totals: there is no readable {DATASET_FILE}",
    "the range of codes and their frames to the last one: no codec is recorded",
)
_FOREIGN: Final = "speaker tags, contexts and provenance of cuts: another tool wrote them, and promises nothing of them"
_NO_INDEX: Final = "stray files: nothing tells which files belong to the dataset"


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: its files, relative to the dataset directory, and what the index says of it."""

    index: int
    files: dict[str, str]
    record: ShardRecord | None

    @property
    def size(self) -> int:
        """Cuts by the index; 0 where there is none."""
        return self.record.count if self.record else 0


@dataclass(frozen=True)
class CheckedDataset:
    """A dataset directory as it is found.

    Attributes:
        dataset: what ``dataset.json`` says, if it can be read.
        findings: what is wrong with the index itself.
        unchecked: what cannot be checked in this dataset at any level, a phrase each.
        has_index: whether there is, or was, an index of sharmill's, so that other files are strays.
    """

    directory: Path
    dataset: DatasetRecord | None
    shards: list[Shard]
    findings: tuple[Finding, ...] = ()
    unchecked: tuple[str, ...] = ()
    has_index: bool = True
    fields: tuple[str, ...] = field(default=())

    @property
    def is_own(self) -> bool:
        """True if sharmill promises its contract for the cuts."""
        return self.dataset is not None and self.dataset.contract == "sharmill"

    @property
    def codecs(self) -> list[CodecRecord]:
        return self.dataset.codecs if self.dataset else []

    def codec_of(self, field: str) -> CodecRecord | None:
        """The codec of a field of codes, if it is recorded."""
        return next((codec for codec in self.codecs if field in codec_fields(codec.name)), None)


def read_checked_dataset(directory: Path) -> CheckedDataset:
    """Read the index of a directory, or list its shards where there is none.

    Raises:
        ConfigError: there is no dataset, or one of another format version.
    """
    if not (directory / DATASET_FILE).exists() and not (directory / SHARDS_FILE).exists():
        try:
            shards = _listed(directory)
        except ConfigError as error:
            raise ConfigError(
                f"{directory} is not a finished dataset, nor a Shar of another tool: {error}", code="no_dataset"
            ) from error
        unchecked = (*_NO_SHARDS, *_NO_DATASET, _NO_INDEX, _FOREIGN)
        return CheckedDataset(directory, None, shards, (), unchecked, has_index=False, fields=_fields(shards))
    findings: list[Finding] = []
    dataset = _read(directory, DATASET_FILE, read_dataset, findings)
    records = _read(directory, SHARDS_FILE, lambda folder: list(read_shards(folder)), findings)
    shards = _listed(directory) if records is None else [_shard(record) for record in records]
    unchecked = (
        *(() if records is not None else _NO_SHARDS),
        *(() if dataset is not None else _NO_DATASET),
        *((_FOREIGN,) if dataset is None or dataset.contract == "foreign" else ()),
    )
    fields = _fields(shards) if dataset is None else tuple(dataset.fields)
    return CheckedDataset(directory, dataset, shards, tuple(findings), unchecked, fields=fields)


def _read(directory: Path, name: str, read: Callable[[Path], Read], findings: list[Finding]) -> Read | None:
    if not (directory / name).is_file():
        findings.append(Finding(code="missing_file", file=name, sentence="the file is not there"))
        return None
    try:
        return read(directory)
    except DamagedShard as error:
        findings.append(Finding(code="damaged", file=name, sentence=str(error)))
        return None


def _shard(record: ShardRecord) -> Shard:
    return Shard(record.index, {field: file.file for field, file in record.fields.items()}, record)


def _listed(directory: Path) -> list[Shard]:
    return [
        Shard(shard.index, {name: path.relative_to(directory).as_posix() for name, path in shard.files.items()}, None)
        for shard in find_shards(directory, complete=False)
    ]


def _fields(shards: Iterable[Shard]) -> tuple[str, ...]:
    """Return all fields that any shard has, in the order of their names."""
    return tuple(sorted({field for shard in shards for field in shard.files}))
