"""The shards that a reader reads: of a dataset with an index, or of a folder that another tool wrote."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Protocol

import msgspec
import numpy as np

from sharmill.errors import ConfigError, DamagedShard
from sharmill.files.staging import STAGING_NAME
from sharmill.files.storage import checksum_bytes
from sharmill.shar.cut_lines import NOT_JSON, decode_cut, read_lines
from sharmill.shar.index import DatasetRecord, ShardRecord, open_index_file, read_dataset, read_index_lines
from sharmill.shar.layout import (
    CONTEXT_UNALIGNED,
    CUTS,
    DATASET_FILE,
    SHARDS_FILE,
    Field,
    codec_of_field,
    sidecar_files,
)
from sharmill.shar.reading.foreign import find_shards

# Begins the names of both fields of contexts.
_CONTEXT: Final = "context_"


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The files of a shard that are read.

    Args:
        index: the shard's number, for messages.
        cuts: the file of its cuts.
        fields: the files of the chosen fields, by the attribute of the cut that each fills.
        count: cuts that there should be, if that is known.
        sidecars: the files for random access by the name of the field, of ``cuts`` too; empty where there are none.
        lines: of the file of cuts, where they have been read already.
    """

    index: int
    cuts: Path
    fields: Mapping[str, Path]
    count: int | None
    sidecars: Mapping[str, list[Path]] = dataclasses.field(default_factory=dict)
    lines: list[bytes] | None = None


class ReadableShard(Protocol):
    """An open shard."""

    def read(self, number: int, position: tuple[int, ...]) -> Any:
        """Return a cut with its position noted in it, or None where the shard leaves this one out."""

    def close(self) -> None: ...


class ShardSource(ABC):
    """Shards in a fixed order, of cuts or of other examples.

    Attributes:
        sequential: the cuts of a shard can be read in its own order only.
    """

    sequential = False

    @property
    @abstractmethod
    def num_shards(self) -> int: ...

    @property
    def shard_size(self) -> int:
        """Cuts in a usual shard: what blocks are chosen by."""
        return max(1, self.count(0)) if self.num_shards else 1

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The values that tell this dataset from another, for saved states; the fields do not matter."""

    @abstractmethod
    def count(self, shard: int) -> int:
        """Return the number of cuts in a shard."""

    def num_cuts(self) -> int:
        return sum(self.count(shard) for shard in range(self.num_shards))

    @abstractmethod
    def open(self, shard: int, epoch: int) -> ReadableShard: ...


def open_shard_source(
    directory: Path, fields: Sequence[str] | None, codec: str | None, sidecars: Path | None = None
) -> IndexedShardSource | _ForeignShardSource:
    """Open the shards of a folder; with ``sidecars``, the folder of its index files, for random access.

    Raises:
        ConfigError: there are none, or not this field or codec; or there are no index files.
    """
    unfinished = (directory / SHARDS_FILE).exists() or (directory / STAGING_NAME).exists()
    has_cuts = (directory / CUTS).is_dir() or any(directory.glob(f"{CUTS}.*"))
    if (directory / DATASET_FILE).exists() or unfinished or not has_cuts:
        return IndexedShardSource(directory, fields, codec, sidecars)
    if sidecars is not None:
        raise ConfigError(
            f"{directory} has no index, so that no cut of it can be read by itself: make one with sharmill index, and "
            "then sharmill sidecars",
            code="no_dataset",
        )
    return _ForeignShardSource(directory, fields, codec)


def _open_files(files: ShardFiles, *, foreign: bool) -> ReadableShard:
    # Bins and sidecars need no lhotse, which this imports.
    from sharmill.shar.reading.shard import OpenShard

    return OpenShard(files, foreign=foreign)


class _Line(msgspec.Struct):
    index: int
    # More cuts than fit in the file of a shard would only be memory for their positions.
    count: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class _ShardLines:
    """``shards.jsonl``, one line at a time, as far as ``dataset.json`` counts shards.

    It is read anew where another has taken its place: codes or shards were added.

    Attributes:
        counts: the cuts of each shard.
    """

    def __init__(self, directory: Path, dataset: DatasetRecord) -> None:
        self._path = directory / SHARDS_FILE
        self._dataset = dataset
        with open_index_file(directory, SHARDS_FILE) as lines:
            self._version, (self._starts, self.counts) = _version_of(lines), self._read(lines)

    def record(self, shard: int) -> ShardRecord:
        """Return the index's record of a shard."""
        with open_index_file(self._path.parent, SHARDS_FILE) as lines:
            if (version := _version_of(lines)) != self._version:
                starts, counts = self._read(lines)
                if not np.array_equal(counts, self.counts):
                    raise DamagedShard(f"{self._path}: the shards have changed while they were read")
                self._version, self._starts = version, starts
            lines.seek(self._starts[shard])
            line = lines.readline()
        try:
            return msgspec.json.decode(line, type=ShardRecord)
        except NOT_JSON as error:
            raise DamagedShard(f"{self._path}: line {shard + 1}: {error}") from error

    def _read(self, lines: BinaryIO) -> tuple[np.ndarray, np.ndarray]:
        """Return where each line begins (num_shards,), and the number of cuts that it records (num_shards,)."""
        decoder = msgspec.json.Decoder(_Line)
        starts: list[int] = []
        counts: list[int] = []
        position = 0
        try:
            # Lines behind those that dataset.json counts are of an append.
            for line in islice(read_index_lines(lines), self._dataset.num_shards):
                read = decoder.decode(line)
                if read.index != len(counts):
                    raise DamagedShard(f"{self._path} lists shard {read.index} where {len(counts)} belongs")
                starts.append(position)
                counts.append(read.count)
                position += len(line)
        except NOT_JSON as error:
            raise DamagedShard(f"{self._path}: line {len(starts) + 1}: {error}") from error
        found, recorded = (len(counts), sum(counts)), (self._dataset.num_shards, self._dataset.num_cuts)
        if found != recorded:
            raise DamagedShard(
                f"{self._path} lists {found[0]} shards instead of {recorded[0]} and {found[1]} cuts instead of "
                f"{recorded[1]}"
            )
        return np.array(starts, np.int64), np.array(counts, np.int64)


def _version_of(stream: BinaryIO) -> tuple[int, ...]:
    """Return what tells a file from one that is put in its place."""
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class IndexedShardSource(ShardSource):
    """A finished dataset, read through ``shards.jsonl``: no folder is listed, however many shards there are."""

    def __init__(
        self, directory: Path, fields: Sequence[str] | None, codec: str | None, sidecars: Path | None = None
    ) -> None:
        self._directory = directory
        self._dataset = read_dataset(directory)
        self._foreign = self._dataset.contract == "foreign"
        known = {field.name: field for field in self._dataset.layout}
        self._stored = {name: known.get(name) for name in self._dataset.fields}
        self._fields = _choose(directory, self._stored, fields, codec)
        self._sidecars = sidecars
        if sidecars is not None and self.num_shards:
            self._require_sidecars(sidecars)

    @cached_property
    def _index(self) -> _ShardLines:
        return _ShardLines(self._directory, self._dataset)

    @property
    def num_shards(self) -> int:
        return self._dataset.num_shards

    @property
    def shard_size(self) -> int:
        counts = self._index.counts
        return int(counts.max()) if len(counts) else 1

    @property
    def identity(self) -> dict[str, Any]:
        return {"num_cuts": self.num_cuts(), "counts": checksum_bytes(self._index.counts.tobytes())}

    def count(self, shard: int) -> int:
        return int(self._index.counts[shard])

    def num_cuts(self) -> int:
        return self._dataset.num_cuts

    def files(self, shard: int) -> ShardFiles:
        record = self._index.record(shard)
        missing = [field for field in (CUTS, *self._fields.values()) if field not in record.fields]
        if missing:
            raise DamagedShard(f"shard {record.index}: there is no {missing[0]}")
        for name in () if self._foreign else (CUTS, *self._fields.values()):
            file, field = record.fields[name].file, self._stored.get(name)
            if field is None or file != field.path(record.index):
                expected = field.path(record.index) if field else "no such field"
                raise DamagedShard(f"shard {record.index}: the index has {file} where {expected} belongs")
        names = {name: record.fields[field].file for name, field in self._fields.items()}
        paths = {name: self._directory / file for name, file in names.items()}
        cuts = record.fields[CUTS].file
        sidecars: dict[str, list[Path]] = {}
        if self._sidecars is not None:
            for name, file in (*names.items(), (CUTS, cuts)):
                sidecars[name] = [self._sidecars / sidecar for sidecar in sidecar_files(file)]
        return ShardFiles(record.index, self._directory / cuts, paths, record.count, sidecars)

    def _require_sidecars(self, folder: Path) -> None:
        """Raise ConfigError where the first shard has not all of its index files."""
        files = self.files(0)
        missing = [path for paths in files.sidecars.values() for path in paths if not path.exists()]
        if missing:
            into = "" if folder == self._directory else f" --into {folder}"
            raise ConfigError(
                f"{missing[0]} is not there: write the index files with sharmill sidecars {self._directory}{into}",
                code="missing_input",
            )

    def open(self, shard: int, epoch: int) -> ReadableShard:
        return _open_files(self.files(shard), foreign=self._foreign)


class _ForeignShardSource(ShardSource):
    """A folder without an index, listed once. Cuts are counted where their number is needed, by reading them."""

    def __init__(self, directory: Path, fields: Sequence[str] | None, codec: str | None) -> None:
        self._shards = find_shards(directory)
        self._counts: dict[int, int] = {}
        # Of the shard that was counted last, which is usually the next to be opened.
        self._counted: dict[int, list[bytes]] = {}
        if self._is_own():
            raise ConfigError(
                f"{directory} is not a finished dataset: there is no {DATASET_FILE}. Finish the run that writes it; "
                "if the index was lost, sharmill index makes it again",
                code="no_dataset",
            )
        self._fields = _choose(directory, dict.fromkeys(self._shards[0].files), fields, codec)

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    @property
    def identity(self) -> dict[str, Any]:
        return {"shards": checksum_bytes(msgspec.json.encode([shard.index for shard in self._shards]))}

    def count(self, shard: int) -> int:
        if shard not in self._counts:
            self._counted = {shard: read_lines(self._shards[shard].files[CUTS])}
            self._counts[shard] = len(self._counted[shard])
        return self._counts[shard]

    def files(self, shard: int) -> ShardFiles:
        found = self._shards[shard]
        paths = {name: found.files[field] for name, field in self._fields.items()}
        return ShardFiles(found.index, found.files[CUTS], paths, self._counts.get(shard))

    def open(self, shard: int, epoch: int) -> ReadableShard:
        files = dataclasses.replace(self.files(shard), lines=self._counted.pop(shard, None))
        return _open_files(files, foreign=True)

    def _is_own(self) -> bool:
        """Return True if sharmill wrote it: then without an index it is not complete, and may lack shards."""
        for shard, found in enumerate(self._shards):
            path = found.files[CUTS]
            lines = read_lines(path)
            self._counts[shard], self._counted = len(lines), {shard: lines}
            if lines:
                custom = decode_cut(path, lines[0]).get("custom")
                return isinstance(custom, dict) and CONTEXT_UNALIGNED in custom
        return False


def _choose(
    directory: Path, stored: Mapping[str, Field | None], fields: Sequence[str] | None, codec: str | None
) -> dict[str, str]:
    """Return which of the stored fields fills each attribute of the cut that is wanted.

    A field of another tool, of which nothing is known but its name, is called like its folder.
    """
    available: dict[str, list[str]] = {}
    for name, known in stored.items():
        if name != CUTS:
            available.setdefault(known.attribute if known else name.rpartition("/")[2], []).append(name)
    codecs = sorted({found for choices in available.values() for field in choices if (found := codec_of_field(field))})
    if codec is not None and codec not in codecs:
        raise ConfigError(
            f"{directory} has no codec {codec!r}; it has {', '.join(codecs) or 'none'}", code="unknown_codec"
        )
    unknown = [field for field in fields or () if field not in available and field not in stored]
    if unknown:
        has_contexts = any(name.startswith(_CONTEXT) for name in available)
        why = ": it has no contexts" if unknown[0].startswith(_CONTEXT) and not has_contexts else ""
        raise ConfigError(
            f"{directory} has no field {unknown[0]!r}{why}; it has {', '.join(available)}", code="unknown_field"
        )
    chosen: dict[str, str] = {}
    for attribute, choices in available.items():
        if fields is not None:
            # The folder that is called so, or else all that are called so on a cut.
            choices = [field for field in choices if field in fields] or (choices if attribute in fields else [])
        wanted = [field for field in choices if codec is None or codec_of_field(field) in (codec, None)]
        if len(wanted) > 1:
            made_by = [found for field in wanted if (found := codec_of_field(field))]
            if len(made_by) == len(wanted):
                raise ConfigError(
                    f"{directory} has the codecs {', '.join(sorted(made_by))}: name one with codec=",
                    code="unknown_codec",
                )
            raise ConfigError(
                f"{directory} has several folders {attribute}: {', '.join(wanted)}; name one of them in fields=, or "
                "keep one",
                code="bad_layout",
            )
        if wanted:
            chosen[attribute] = wanted[0]
    return chosen
