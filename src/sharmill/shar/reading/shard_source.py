"""The shards that a reader reads: from a dataset with an index, or from a folder that another tool wrote."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
import numpy as np

from sharmill.comparisons import Comparison, parse_where
from sharmill.errors import ConfigError, DamagedShard
from sharmill.files.checksums import checksum_bytes
from sharmill.files.location import Location, RemoteLocation
from sharmill.registry import nearest
from sharmill.shar.fields import CUTS, DATASET_FILE, DURATION, SHARDS_FILE, Field, codec_of_field, sidecar_files
from sharmill.shar.index import FieldFile, ShardRecord, decode_shards, is_indexed, read_dataset, read_shards
from sharmill.shar.json_lines import read_json_lines
from sharmill.shar.reading.shard_files import ShardFiles
from sharmill.shar.rebuild import find_foreign_shards

# The prefix of the names of both context fields.
_CONTEXT: Final = "context_"


class ReadableShard(Protocol):
    """An open shard, whose files stay open as long as it is referenced."""

    def read(self, number: int, position: tuple[int, ...]) -> Any:
        """Return the cut at index ``number`` of the shard, with ``position`` stored in it; None if it is left out."""


class ShardSource(ABC):
    """Shards of cuts or other examples, in a fixed order.

    Attributes:
        num_shards: the number of shards.
        sequential: True if the cuts of a shard can only be read in their stored order.
        omits: describes the cuts that are left out, such as ``have no target_codes``; empty if none are.
        is_remote: True if the files of shards are copied from a server before they are read.
    """

    num_shards: int
    sequential = False
    is_remote = False
    omits: str = ""

    @property
    def shard_size(self) -> int:
        """The number of cuts in a typical shard, from which the number of blocks is chosen."""
        return max(1, self.count(0)) if self.num_shards else 1

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The values that distinguish this dataset from others in saved states, regardless of the fields read."""

    @abstractmethod
    def count(self, shard: int) -> int:
        """Return the number of cuts in a shard."""

    def expected(self, shard: int) -> np.ndarray | Literal[True]:
        """Return a mask (count,) of the cuts of a shard that pass the loader's known filters; True if all do."""
        return True

    def num_cuts(self) -> int:
        return sum(self.count(shard) for shard in range(self.num_shards))

    def locations(self, shard: int) -> list[Location]:
        """Return the files of a shard that may have to be copied from a server."""
        return []

    @abstractmethod
    def open(self, shard: int, epoch: int) -> ReadableShard: ...


def open_shard_source(
    directory: Location,
    fields: Sequence[str] | None,
    codec: str | None,
    sidecars: Location | None = None,
    where: str = "",
) -> "CutSource":
    """Open the shards of a dataset or folder; ``sidecars`` is the folder of its index files, for random access.

    Raises:
        ConfigError: there are no shards, or a field, a column of ``where``, the codec or an index file is missing.
    """
    conditions = parse_where(where) if where else []
    if isinstance(directory, RemoteLocation):
        if sidecars is not None:
            raise ConfigError(
                f"shuffle='global' reads single cuts, but only whole shards can be copied from {directory}: use "
                "shuffle=True, or copy the dataset to a disk",
                code="bad_config_value",
            )
        return IndexedShardSource(directory, fields, codec, conditions)
    has_cuts = (directory / CUTS).is_dir() or any(directory.glob(f"{CUTS}.*"))
    if is_indexed(directory) or not has_cuts:
        return IndexedShardSource(directory, fields, codec, conditions, sidecars)
    if sidecars is not None:
        raise ConfigError(
            f"{directory} has no index, so its cuts cannot be read separately: create the index with sharmill index, "
            "then run sharmill sidecars",
            code="no_dataset",
        )
    return _ForeignShardSource(directory, fields, codec, conditions)


class CutSource(ShardSource):
    """Shards of cuts in a folder.

    Args:
        stored: the fields of the folder, by name; the value is None if only the name is known.
        fields: the fields to read; None for all.
        codec: the codec whose codes are read, if there are several.
        conditions: the conditions that a cut must meet.
        foreign: True if another tool wrote the shards.
    """

    def __init__(
        self,
        directory: Location,
        stored: Mapping[str, Field | None],
        fields: Sequence[str] | None,
        codec: str | None,
        conditions: Sequence[Comparison],
        *,
        foreign: bool,
    ) -> None:
        self._directory = directory
        self._fields = _choose(directory, stored, fields, codec)
        self._foreign = foreign
        self._needed = [
            attribute
            for attribute, name in self._fields.items()
            if codec_of_field(name) and (known := stored[name]) is not None and known.optional
        ]
        self._conditions = conditions
        self._columns = _find_columns(directory, stored, conditions)
        reasons = [f"have no {attribute}" for attribute in self._needed]
        reasons += [f"do not meet {' and '.join(map(str, conditions))}"] if conditions else []
        self.omits = " or ".join(reasons)
        self.is_remote = isinstance(directory, RemoteLocation)

    @abstractmethod
    def files(self, shard: int) -> ShardFiles:
        """Return the files of a shard."""

    def locations(self, shard: int) -> list[Location]:
        return self.files(shard).locations

    def open(self, shard: int, epoch: int) -> ReadableShard:
        # Import here, because estimating buckets and writing sidecars do not need lhotse.
        from sharmill.shar.reading.open_shard import OpenShard

        return OpenShard(
            self.files(shard), foreign=self._foreign, needed=self._needed, conditions=self._conditions,
            unattached=self._columns.keys() - self._fields.keys(),
        )  # fmt: skip


class _Line(msgspec.Struct):
    index: int
    # No shard file has more cuts; a higher number would only waste memory on positions.
    count: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


_line_decoder = msgspec.json.Decoder(_Line)


class IndexedShardSource(CutSource):
    """A finished dataset. No folder is listed, regardless of the number of shards.

    For a dataset written by sharmill, only the numbers of cuts are read from ``shards.jsonl``, since the names of the
    files follow from its layout. For a dataset at a URL the checksums are read as well, to distinguish its files from
    older versions.
    """

    def __init__(
        self,
        directory: Location,
        fields: Sequence[str] | None,
        codec: str | None,
        conditions: Sequence[Comparison] = (),
        sidecars: Location | None = None,
    ) -> None:
        self._dataset = read_dataset(directory)
        self.num_shards = self._dataset.num_shards
        self._stored = {name: self._dataset.fields_by_name.get(name) for name in self._dataset.fields}
        super().__init__(
            directory, self._stored, fields, codec, conditions, foreign=self._dataset.contract == "foreign"
        )
        if CUTS not in self._stored:
            raise self._damage(f"belongs to a {DATASET_FILE} without the field {CUTS}")
        self._sidecars = sidecars
        if sidecars is not None and self.num_shards:
            missing = [path for paths in self.files(0).sidecars.values() for path in paths if not path.exists()]
            if missing:
                into = "" if sidecars == directory else f" --into {sidecars}"
                raise ConfigError(
                    f"{missing[0]} is missing: write the index files with sharmill sidecars {directory}{into}",
                    code="missing_input",
                )

    @cached_property
    def _counts(self) -> np.ndarray:
        """The number of cuts of each shard (num_shards,)."""
        counts: list[int] = []
        for line in decode_shards(self._directory, self.num_shards, _line_decoder):
            if line.index != len(counts):
                raise self._damage(f"lists shard {line.index} where {len(counts)} should be")
            counts.append(line.count)
        found, recorded = (len(counts), sum(counts)), (self.num_shards, self._dataset.num_cuts)
        if found != recorded:
            raise self._damage(
                f"lists {found[0]} shards instead of {recorded[0]} and {found[1]} cuts instead of {recorded[1]}"
            )
        return np.array(counts, np.int64)

    @cached_property
    def _records(self) -> list[ShardRecord]:
        return list(read_shards(self._directory, self.num_shards))

    @property
    def shard_size(self) -> int:
        return int(self._counts.max(initial=1))

    @property
    def identity(self) -> dict[str, Any]:
        return {"num_cuts": self.num_cuts(), "counts": checksum_bytes(self._counts.tobytes())}

    def count(self, shard: int) -> int:
        return int(self._counts[shard])

    def num_cuts(self) -> int:
        # Do not trust the number in the record: a list of the cuts would reserve memory for that many.
        return int(self._counts.sum())

    def files(self, shard: int) -> ShardFiles:
        fields = ((self._columns | self._fields) | {CUTS: CUTS}).items()
        if self.is_remote:
            paths = {attribute: self._recorded(name, shard).below(self._directory) for attribute, name in fields}
            return ShardFiles(shard, paths.pop(CUTS), paths, self.count(shard))
        names = {attribute: self._file(name, shard) for attribute, name in fields}
        sidecars: dict[str, list[Location]] = {}
        if self._sidecars is not None:
            for attribute, file in names.items():
                sidecars[attribute] = [self._sidecars / sidecar for sidecar in sidecar_files(file)]
        paths = {attribute: self._directory / file for attribute, file in names.items()}
        return ShardFiles(shard, paths.pop(CUTS), paths, self.count(shard), sidecars)

    def _file(self, name: str, shard: int) -> str:
        """Return the path of a field's file, relative to the dataset directory."""
        field = self._stored[name]
        return self._recorded(name, shard).file if self._foreign or field is None else field.path(shard)

    def _recorded(self, name: str, shard: int) -> FieldFile:
        """Return the index entry of a field's file in one shard."""
        if name not in self._records[shard].fields:
            raise self._damage(f"names no file of {name} for shard {shard}")
        return self._records[shard].fields[name]

    def _damage(self, what: str) -> DamagedShard:
        return DamagedShard(
            f"{self._directory / SHARDS_FILE} {what}; run sharmill validate {self._directory} for a full list of damage"
        )


class _ForeignShardSource(CutSource):
    """The shards of a folder without an index, which is listed once. If needed, cuts are counted by reading them."""

    def __init__(
        self, directory: Path, fields: Sequence[str] | None, codec: str | None, conditions: Sequence[Comparison]
    ) -> None:
        self._shards = find_foreign_shards(directory)
        stored = dict.fromkeys(self._shards[0].files)
        super().__init__(directory, stored, fields, codec, conditions, foreign=True)
        self._counts: dict[int, int] = {}
        # The lines of the shard that was counted most recently, which is usually opened next.
        self._counted: dict[int, list[bytes]] = {}
        self.num_shards = len(self._shards)

    @property
    def identity(self) -> dict[str, Any]:
        return {"shards": checksum_bytes(msgspec.json.encode([shard.index for shard in self._shards]))}

    def count(self, shard: int) -> int:
        if shard not in self._counts:
            self._counted = {shard: read_json_lines(self._directory / self._shards[shard].files[CUTS])}
            self._counts[shard] = len(self._counted[shard])
        return self._counts[shard]

    def files(self, shard: int) -> ShardFiles:
        found = self._shards[shard]
        chosen = {
            attribute: self._directory / found.files[field]
            for attribute, field in (self._columns | self._fields).items()
        }
        cuts, lines = self._directory / found.files[CUTS], self._counted.get(shard)
        return ShardFiles(found.index, cuts, chosen, self._counts.get(shard), lines=lines)


def _attribute_of(name: str, known: Field | None) -> str:
    """Return the attribute of a cut that a stored field fills; if only its name is known, the name of its folder."""
    return known.attribute if known else name.rpartition("/")[2]


def _find_columns(
    directory: Location, stored: Mapping[str, Field | None], conditions: Sequence[Comparison]
) -> dict[str, str]:
    """Return, for each column that conditions compare, the name of the stored field with its values.

    Raises:
        ConfigError: the dataset has no such column.
    """
    columns = {_attribute_of(name, known): name for name, known in stored.items()
               if name != CUTS and (known is None or known.kind == "value")}  # fmt: skip
    names = dict.fromkeys(one.key for one in conditions if one.key != DURATION)
    if unknown := [name for name in names if name not in columns]:
        raise ConfigError(
            f"where: {directory} has no column {unknown[0]!r}{nearest(unknown[0], [*columns, DURATION])}",
            code="unknown_field",
        )
    return {name: columns[name] for name in names}


def _choose(
    directory: Location, stored: Mapping[str, Field | None], fields: Sequence[str] | None, codec: str | None
) -> dict[str, str]:
    """Return, for each wanted attribute of the cut, the name of the stored field that fills it."""
    available: dict[str, list[str]] = {}
    for name, known in stored.items():
        if name != CUTS:
            available.setdefault(_attribute_of(name, known), []).append(name)
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
            # Prefer the field with this name; otherwise consider all fields that fill this attribute.
            choices = [field for field in choices if field in fields] or (choices if attribute in fields else [])
        wanted = [field for field in choices if codec is None or codec_of_field(field) in (codec, None)]
        if len(wanted) > 1:
            made_by = [found for field in wanted if (found := codec_of_field(field))]
            if len(made_by) == len(wanted):
                raise ConfigError(
                    f"{directory} has the codecs {', '.join(sorted(made_by))}: choose one with codec=",
                    code="unknown_codec",
                )
            raise ConfigError(
                f"{directory} has several folders for {attribute}: {', '.join(wanted)}; name one of them in fields=, "
                "or keep only one",
                code="bad_layout",
            )
        if wanted:
            chosen[attribute] = wanted[0]
    return chosen
