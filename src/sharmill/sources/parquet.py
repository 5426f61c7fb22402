"""Parquet and Arrow files of speech, as Hugging Face datasets are: the audio of a row is bytes in it, or a path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from sharmill.audio.row_files import RowFile, UnreadableRows, audio_bytes, open_rows, recent_rows
from sharmill.errors import ConfigError
from sharmill.files.storage import checksum_bytes
from sharmill.manifest import Member
from sharmill.registry import nearest, require_package
from sharmill.sources import ContainerSource, Located, Piece, RawRecord, Unreadable
from sharmill.sources.files import bad_file, open_input, read_ends

if TYPE_CHECKING:
    import pyarrow as pa

# Every rank that reads a row of a group has the audio of all of its rows in memory.
_MAX_GROUP_BYTES: Final = 2 << 30
_MAX_FOOTER_BYTES: Final = 256 << 20
_ROWS_AT_ONCE: Final = 1000
# Stands for the path of a row's audio beside the keys of its record, which can have any name but this.
_NAME: Final = ""
_NOT_TEXT: Final = object()
# Names of Arrow's types.
_TEXTS: Final = ("string", "large_string", "string_view")
_BYTES: Final = ("binary", "large_binary", "binary_view")
_LISTS: Final = ("list<", "large_list<", "fixed_size_list<")


@dataclass(frozen=True, kw_only=True)
class ParquetSource(ContainerSource):
    """Records of parquet or Arrow files, such as those of Hugging Face audio datasets: one utterance a row."""

    file_keys: ClassVar[tuple[str, ...]] = ("parquet",)
    type: str = "parquet"
    parquet: str | list[str]
    """Path of a parquet or Arrow file, or a list of them; as ``manifest`` of ``nemo`` it may name shards, or have ``*``
    and ``?``."""
    audio: str = "audio"
    """Column of the audio: a struct of ``bytes`` and ``path``, bytes, or paths relative to ``audio_root``."""
    columns: dict[str, str] = field(default_factory=dict)
    """Keys of records and the columns that they come from, ``{text: sentence}``. Other columns of texts, numbers and
    dates keep their names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "audio_filepath" in self.columns:
            raise ValueError("audio names the column of the audio, be it of paths; leave audio_filepath out of columns")

    def check(self) -> None:
        """Raise ConfigError where a file cannot be read, or lacks a column that the configuration names."""
        require_package("pyarrow", extra="parquet")
        for file in self.files:
            self._check_file(file, _open(file))

    def identity(self) -> dict[str, Any]:
        """Return the size of every file and a checksum of its ends, with all that parquet has at its end."""
        self.check()
        return {f"{number} {file.name}": _identify(file) for number, file in enumerate(self.files)}

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of rows, of whole groups where these are small enough; only the sizes of groups are read."""
        for number, file in enumerate(self.files):
            group = begin = end = 0
            for index, size in enumerate(_open(file).group_sizes):
                if end + size - begin > records_per_piece and end > begin:
                    yield _piece(number, group, begin, end)
                    group, begin = index, end
                # A group that is larger than a piece is read by several.
                while end + size - begin > records_per_piece:
                    size -= records_per_piece - (end - begin)
                    end = begin + records_per_piece
                    yield _piece(number, group, begin, end)
                    group, begin = index, end
                end += size
            if end > begin:
                yield _piece(number, group, begin, end)

    def read(self, piece: dict[str, Any]) -> Iterator[RawRecord]:
        """Yield the records of the rows of a piece."""
        yield from self._read(piece, with_audio=True)

    def records(self) -> Iterator[RawRecord]:
        """Yield the texts of all records; audio is read only where nothing else tells if there is any."""
        for piece in self.pieces(_ROWS_AT_ONCE):
            yield from self._read(piece.params, with_audio=False)

    def _read(self, piece: dict[str, Any], *, with_audio: bool) -> Iterator[RawRecord]:
        file = self.files[piece["file"]]
        rows = _Rows(file, self._container(file), self.audio, self.columns, with_audio)
        group, start = piece["group"], sum(rows.group_sizes[: piece["group"]])
        begin = piece["begin"]
        while begin < piece["end"]:
            end = min(piece["end"], start + rows.group_sizes[group])
            yield from rows.read(group, start, begin, end)
            start += rows.group_sizes[group]
            group, begin = group + 1, end

    def _container(self, file: Path) -> str | None:
        """Return the name of a file below the audio root; None where it lies elsewhere, as files of paths may."""
        try:
            return self.container(file)
        except ConfigError:
            return None

    def _check_file(self, file: Path, rows: RowFile) -> None:
        names = rows.schema.names
        if len(set(names)) < len(names):
            raise bad_file(file, "parquet", "has two columns of one name")
        wanted = {f"columns.{key}": column for key, column in self.columns.items()}
        for where, column in {"audio": self.audio, **wanted}.items():
            if column not in names:
                raise ConfigError(
                    f"{where}: {file} has no column {column!r}{nearest(column, names)}", code="unknown_key"
                )
        for where, column in wanted.items():
            if not _is_plain(kind := rows.schema.field(column).type):
                raise ConfigError(
                    f"{where}: the column {column!r} of {file} is {kind}, not texts, numbers or dates",
                    code="bad_config_value",
                )
        if problem := _problem(rows.schema.field(self.audio).type):
            raise ConfigError(f"audio: the column {self.audio!r} of {file} {problem}", code="bad_config_value")
        if _begins_with_bytes(file, rows, self.audio):
            self.container(file)
        largest = max((rows.num_bytes(group, self.audio) for group in range(len(rows.group_sizes))), default=0)
        if largest > _MAX_GROUP_BYTES:
            raise bad_file(
                file,
                "parquet",
                f"has a row group with {largest / (1 << 30):.1f} GiB of audio, which every rank would have in memory; "
                "write it again with smaller row groups",
            )


class _Rows:
    """The rows of one file as records; without ``with_audio`` their texts only."""

    def __init__(
        self, path: Path, container: str | None, audio: str, columns: dict[str, str], with_audio: bool
    ) -> None:
        file = recent_rows.file(path)
        self.group_sizes = file.group_sizes
        self._path, self._container, self._audio, self._with_audio = path, container, audio, with_audio
        self._file = file
        kind = file.schema.field(audio).type
        self._bytes = audio_bytes(file.schema, audio)
        self._name = audio if str(kind) in _TEXTS else f"{audio}.path" if "path" in _fields(kind) else None
        mapped = {*columns, *columns.values(), audio}
        kept = [column.name for column in file.schema if _is_plain(column.type) and column.name not in mapped]
        self._keys = {name: name for name in kept} | columns

    def read(self, group: int, start: int, begin: int, end: int) -> Iterator[RawRecord]:
        """Yield the records of the rows from ``begin`` to ``end`` of a group, which begins at row ``start``."""
        found = self._texts(group, begin - start, end - start)
        sizes, problem = self._sizes(group, begin - start, end - start)
        for row, record, size in zip(range(begin, end), found, sizes, strict=True):
            own = f"{self._container or self._path.name}#{row}"
            if isinstance(record, str):
                yield Unreadable("malformed", record, msgspec.json.encode({"audio_filepath": own}).decode())
                continue
            name = record.pop(_NAME, None)
            if "audio_filepath" in record:
                record["source_audio_filepath"] = record.pop("audio_filepath")
            if size is None and name:
                yield msgspec.json.encode(record | {"audio_filepath": name})
                continue
            text = msgspec.json.encode(record | {"audio_filepath": own} | ({"audio_name": name} if name else {}))
            if problem:
                yield Unreadable("unreadable_audio", problem, text.decode())
            elif size is None:
                yield Unreadable("missing_audio", "the row has neither bytes of audio nor a path", text.decode())
            elif self._container is None:
                detail = "its file does not lie below audio_root; leave that out, or name a folder above all files"
                yield Unreadable("outside_root", detail, text.decode())
            else:
                member = Member(self._container, f"row:{self._audio}", row, size)
                yield Located(text, member) if self._with_audio else text

    def _texts(self, group: int, first: int, last: int) -> list[dict[str, Any] | str]:
        """Return the keys of rows but those of their audio, or of rows that cannot be read the reason."""
        names = list(dict.fromkeys([*self._keys.values(), *([self._name] if self._name else [])]))
        if not names:
            return [{} for _ in range(first, last)]
        try:
            table = recent_rows.table(self._path, names, group).slice(first, last - first)
        except UnreadableRows as error:
            return [f"{self._path.name}: {error}"] * (last - first)
        columns = {key: _values(table.column(name)) for key, name in self._keys.items()}
        if self._name:
            columns[_NAME] = _values(_field(table.column(self._audio), "path"))
        rows: list[dict[str, Any] | str] = []
        for values in zip(*columns.values(), strict=True):
            record = {key: value for key, value in zip(columns, values, strict=True) if value is not None}
            bad = next((key for key, value in record.items() if value is _NOT_TEXT), None)
            rows.append(record if bad is None else f"the column {self._keys.get(bad, self._name)!r} is not UTF-8")
        return rows

    def _sizes(self, group: int, first: int, last: int) -> tuple[list[int | None], str | None]:
        """Return how many bytes of audio rows have, None for those without any; and why they cannot be read.

        Without ``with_audio`` other sizes than None mean nothing.
        """
        import pyarrow.compute

        count = last - first
        if self._bytes is None:
            return [None] * count, None
        if not self._with_audio:
            num_nulls = self._file.num_nulls(group, self._bytes)
            if num_nulls in (0, self.group_sizes[group]):
                return [0 if num_nulls == 0 else None] * count, None
        try:
            audio = recent_rows.audio(self._path, self._audio, group).slice(first, count)
        except UnreadableRows as error:
            return [0] * count, f"{self._path.name}: {error}"
        return pyarrow.compute.binary_length(audio).to_pylist(), None


def _open(file: Path) -> RowFile:
    read_ends(file, "parquet")
    try:
        return open_rows(file)
    except UnreadableRows as error:
        raise ConfigError(str(error), code="bad_manifest") from error


def _begins_with_bytes(file: Path, rows: RowFile, audio: str) -> bool:
    """Return True if any of the first rows has audio in it."""
    name = audio_bytes(rows.schema, audio)
    if name is None or not rows.group_sizes:
        return False
    num_nulls = rows.num_nulls(0, name)
    try:
        return (recent_rows.audio(file, audio, 0).null_count if num_nulls is None else num_nulls) < rows.group_sizes[0]
    except UnreadableRows:
        return True


def _identify(file: Path) -> list[Any]:
    head, tail = read_ends(file, "parquet")
    footer = int.from_bytes(tail[-8:-4], "little") + 8 if tail.endswith(b"PAR1") else 0
    if len(tail) < footer <= _MAX_FOOTER_BYTES:
        with open_input(file, "parquet") as stream:
            stream.seek(-footer, 2)
            tail = stream.read()
    return [file.stat().st_size, checksum_bytes(head + tail)]


def _piece(file: int, group: int, begin: int, end: int) -> Piece:
    return Piece(end - begin, {"file": file, "group": group, "begin": begin, "end": end})


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column as JSON has them; ``_NOT_TEXT`` for a text that is not UTF-8."""
    import pyarrow

    if pyarrow.types.is_temporal(column.type):
        column = column.cast(pyarrow.string())
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _NOT_TEXT


def _problem(kind: pa.DataType) -> str | None:
    """Return what is wrong with a column as one of audio."""
    fields = _fields(kind)
    if "array" in fields or str(kind).startswith(_LISTS):
        return (
            "has decoded samples, and only audio files are read; let Hugging Face's datasets write it with the feature "
            "Audio, or save the samples as files"
        )
    if fields:
        usable = [name for name in ("bytes", "path") if name in fields]
        if usable and all(str(fields[n]) in _BYTES if n == "bytes" else str(fields[n]) in _TEXTS for n in usable):
            return None
    elif str(kind) in _BYTES or str(kind) in _TEXTS:
        return None
    return f"is {kind}; audio is bytes, paths, or a struct of bytes and path"


def _field(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    import pyarrow.compute

    return pyarrow.compute.struct_field(column, name) if pyarrow.types.is_struct(column.type) else column


def _fields(kind: pa.DataType) -> dict[str, pa.DataType]:
    """Return the types of the fields of a struct; of any other type nothing."""
    import pyarrow

    return {field.name: field.type for field in kind} if pyarrow.types.is_struct(kind) else {}


def _is_plain(kind: pa.DataType) -> bool:
    """Return True for texts, numbers and dates."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return str(kind) in _TEXTS or is_number or types.is_timestamp(kind) or types.is_date(kind)
