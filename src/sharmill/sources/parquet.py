"""Parquet and Arrow files of speech, such as Hugging Face datasets: each row contains its audio as bytes, or a path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from sharmill.audio.arrow import RowFile, UnreadableRows, open_rows, read_audio_column
from sharmill.config import require
from sharmill.errors import ConfigError, refuse
from sharmill.files.location import Location, local
from sharmill.manifest import Member
from sharmill.registry import nearest, require_package
from sharmill.sources import ColumnSource, ContainerSource, DescribedRecord, RawRecord, RunSource, UnreadableRecord
from sharmill.sources.files import Digest, bad_file, read_ends, refuse_file

if TYPE_CHECKING:
    import pyarrow as pa

# Maximum size of the audio in a row group, since a rank that reads any row of a group keeps the whole group's audio in
# memory.
_MAX_GROUP_BYTES: Final = 2 << 30
# Temporary key for the path of a row's audio; no column can have this name.
_NAME: Final = ""
_UNREADABLE: Final = object()
# Keys that affect how a record is read. A column with one of these names must not be dropped because of its type.
_USED_KEYS: Final = (
    "text", "normalized_text", "speaker", "language", "lang", "offset", "duration", "channel", "_skipme", "custom",
)  # fmt: skip
# Arrow type names.
_TEXTS: Final = ("string", "large_string", "string_view")
_BYTES: Final = ("binary", "large_binary", "binary_view")


@dataclass(frozen=True, kw_only=True)
class ParquetSource(ContainerSource, RunSource, ColumnSource):
    """Records of parquet or Arrow files, such as Hugging Face audio datasets: one utterance per row."""

    file_keys: ClassVar[tuple[str, ...]] = ("parquet",)
    # It is enough to read both ends, since the end of a parquet file describes everything except the content of the
    # rows.
    digests: ClassVar[dict[str, Digest]] = {"parquet": "ends"}
    checks_columns: ClassVar[bool] = True
    type: str = "parquet"
    parquet: str | list[str]
    """Path of a parquet or Arrow file, or a list of paths, as for ``manifest`` of ``nemo``."""
    audio: str = "audio"
    """Column with the audio: a struct of ``bytes`` and ``path``, bytes, or paths relative to ``audio_root``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = "audio_filepath must not be in columns; name the column with audio or paths in the key audio"
        require("audio_filepath" not in self.columns, problem)

    def check(self) -> None:
        """Raise ConfigError if a file cannot be read, or lacks a column that the configuration names."""
        require_package("pyarrow")
        named = {f"columns.{key}": column for key, column in self.columns.items()}
        mapped = self.mapped | {self.audio}
        for file in self.files:
            rows = _open(file)
            names = rows.schema.names
            wanted = named | {key: key for key in _USED_KEYS if key in names and key not in mapped}
            refuse_file(
                file, "parquet", (len(set(names)) < len(names), "has two columns with the same name; rename one")
            )
            refuse(
                *(
                    (column not in names, f"{where}: {file} has no column {column!r}{nearest(column, names)}")
                    for where, column in {"audio": self.audio, **named}.items()
                ),
                code="unknown_key",
            )
            fields = {where: rows.schema.field(column) for where, column in wanted.items()}
            problem = _problem(rows.schema.field(self.audio).type)
            refuse(
                *(
                    (
                        not _is_kept(column),
                        f"{where}: the column {column.name!r} of {file} has the type {column.type}, not text, "
                        "numbers or dates; choose another column",
                    )
                    for where, column in fields.items()
                ),
                (problem, f"audio: the column {self.audio!r} of {file} {problem}"),
            )
            if _begins_with_bytes(file, rows, self.audio):
                self.container(file)
            largest = max((rows.num_bytes(group, self.audio) for group in range(len(rows.group_sizes))), default=0)
            problem = (
                f"has a row group with {largest / (1 << 30):.1f} GiB of audio, which every rank would keep in memory; "
                "rewrite it with smaller row groups"
            )
            refuse_file(file, "parquet", (largest > _MAX_GROUP_BYTES, problem))

    def runs(self, size: int) -> Iterator[tuple[list[Any], int]]:
        """Yield each row group with its number of rows."""
        for number, file in enumerate(self.files):
            yield from (([number, group], rows) for group, rows in enumerate(_open(file).group_sizes))

    def records(self) -> Iterator[RawRecord]:
        """Yield all records without their audio; audio is read only if nothing else shows whether a row has any."""
        for piece in self.pieces(1000):
            for span in piece.params["spans"]:
                yield from self.entries(*span, with_audio=False)

    def entries(self, place: list[Any], begin: int, end: int, *, with_audio: bool = True) -> Iterator[RawRecord]:
        """Yield the records of rows in a row group; if ``with_audio`` is False, omit the location of the audio."""
        number, group = place
        file = self.files[number]
        path, container = local(file), None
        rows = open_rows(path)
        with suppress(ConfigError):  # files that contain paths instead of audio may be anywhere
            container = self.container(file)
        texts = self._texts(file, rows, group, slice(begin, end))
        sizes, problem = self._sizes(path, rows, group, slice(begin, end), with_audio)
        first = rows.starts[group] + begin
        for row, record, size in zip(range(first, first + end - begin), texts, sizes, strict=True):
            own = f"{container or file.name}#{row}"
            if isinstance(record, str):
                yield UnreadableRecord("malformed", record, msgspec.json.encode({"audio_filepath": own}).decode())
                continue
            name = record.pop(_NAME, None)
            if "audio_filepath" in record:
                record["source_audio_filepath"] = record.pop("audio_filepath")
            if size is None and name:
                yield msgspec.json.encode(record | {"audio_filepath": name})
                continue
            text = msgspec.json.encode(record | {"audio_filepath": own} | ({"audio_name": name} if name else {}))
            if problem:
                yield UnreadableRecord("unreadable_audio", problem, text.decode())
            elif size is None:
                yield UnreadableRecord("missing_audio", "the row has neither bytes of audio nor a path", text.decode())
            elif container is None:
                detail = (
                    "its file is not below audio_root; leave audio_root out, or name a folder that contains all files"
                )
                yield UnreadableRecord("outside_root", detail, text.decode())
            elif with_audio:
                yield DescribedRecord(text, Member(container, f"row:{self.audio}", row, size))
            else:
                yield text

    def _texts(self, file: Location, rows: RowFile, group: int, part: slice) -> list[dict[str, Any] | str]:
        """Return the record of each row without its audio, or a str with the reason why the row cannot be read."""
        mapped = self.mapped | {self.audio}
        schema, labels = rows.schema, _label_names(rows.schema)
        kept = [column.name for column in schema if _is_kept(column) and column.name not in mapped]
        keys = {name: name for name in kept} | self.columns
        kind = schema.field(self.audio).type
        if str(kind) in _TEXTS:
            keys[_NAME] = self.audio
        elif "path" in _fields(kind):
            keys[_NAME] = f"{self.audio}.path"
        count = part.stop - part.start
        if not keys:
            return [{} for _ in range(count)]
        try:
            table = rows.read(group, list(dict.fromkeys(keys.values())))[part]
        except UnreadableRows as error:
            return [f"{file.name}: {error}"] * count
        columns = {key: _values(table.column(name), labels.get(name)) for key, name in keys.items() if key != _NAME}
        if _NAME in keys:
            columns[_NAME] = _values(_field(table.column(self.audio), "path"))
        found: list[dict[str, Any] | str] = []
        for values in zip(*columns.values(), strict=True):
            record = {key: value for key, value in zip(columns, values, strict=True) if value is not None}
            bad = next((key for key, value in record.items() if value is _UNREADABLE), None)
            found.append(
                record if bad is None else f"the column {keys[bad]!r} is not valid UTF-8, or is a label without a name"
            )
        return found

    def _sizes(
        self, path: Path, rows: RowFile, group: int, part: slice, with_audio: bool
    ) -> tuple[list[int | None], str | None]:
        """Return the audio size of each row in bytes, and the reason if the audio cannot be read, otherwise None.

        The size of a row without audio is None. If ``with_audio`` is not set, all other sizes may be wrong.
        """
        import pyarrow.compute

        column, count = rows.audio_bytes(self.audio), part.stop - part.start
        if column is None:
            return [None] * count, None
        if not with_audio and (num_nulls := rows.num_nulls(group, column)) in (0, rows.group_sizes[group]):
            return [0 if num_nulls == 0 else None] * count, None
        try:
            audio = read_audio_column(path, self.audio, group)[part]
        except UnreadableRows as error:
            return [0] * count, f"{path.name}: {error}"
        return pyarrow.compute.binary_length(audio).to_pylist(), None


def _open(file: Location) -> RowFile:
    read_ends(file, "parquet")
    path = local(file)
    try:
        rows = open_rows(path)
        _label_names(rows.schema)
    except UnreadableRows as error:
        # Users know the file by its URL, not by its copy.
        raise ConfigError(str(error).replace(str(path), str(file)), code="bad_manifest") from error
    except msgspec.MsgspecError as error:
        raise bad_file(file, "parquet", "has unreadable metadata under 'huggingface'; remove that entry") from error
    return rows


def _begins_with_bytes(file: Location, rows: RowFile, audio: str) -> bool:
    """Return True if any row of the first row group contains audio, or if the audio cannot be read."""
    name = rows.audio_bytes(audio)
    if name is None or not rows.group_sizes:
        return False
    num_nulls = rows.num_nulls(0, name)
    try:
        if num_nulls is None:
            num_nulls = read_audio_column(local(file), audio, 0).null_count
        return num_nulls < rows.group_sizes[0]
    except UnreadableRows:
        return True


def _label_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the label names by column, from the metadata that Hugging Face's ``datasets`` stores in a file.

    Raises:
        msgspec.MsgspecError: the metadata has an unexpected format.
    """
    noted = msgspec.json.decode((schema.metadata or {}).get(b"huggingface", b"{}"), type=dict[str, Any])
    info = msgspec.convert(noted.get("info") or {}, dict[str, Any])
    features = msgspec.convert(info.get("features") or {}, dict[str, Any])
    return {
        column: msgspec.convert(feature["names"], list[str])
        for column, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
    }


def _values(column: pa.ChunkedArray, names: list[str] | None = None) -> list[Any]:
    """Return the values of a column as JSON values, with label numbers replaced by ``names``.

    A text that is not UTF-8, or a label that has no name, is replaced by ``_UNREADABLE``.
    """
    import pyarrow

    if pyarrow.types.is_temporal(column.type):
        column = column.cast(pyarrow.string())
    elif pyarrow.types.is_decimal(column.type):
        column = column.cast(pyarrow.float64())
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]
    if names is None:
        return values
    of_labels: dict[Any, Any] = {None: None, -1: None, **dict(enumerate(names))}
    return [of_labels.get(value, _UNREADABLE) for value in values]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _UNREADABLE


def _problem(kind: pa.DataType) -> str | None:
    """Return a message if columns of this type cannot contain audio, otherwise None."""
    fields = _fields(kind)
    wanted = {"bytes": _BYTES, "path": _TEXTS}
    if "array" in fields or str(kind).startswith(("list<", "large_list<", "fixed_size_list<")):
        return (
            "has decoded samples, but only encoded audio is supported; write it with Hugging Face's feature "
            "Audio, or save the samples as files"
        )
    usable = [str(fields[name]) in types for name, types in wanted.items() if name in fields]
    if fields and usable and all(usable):
        return None
    if not fields and str(kind) in (*_BYTES, *_TEXTS):
        return None
    return f"has the type {kind}; audio must be bytes, paths, or a struct of bytes and path"


def _field(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    import pyarrow.compute

    return pyarrow.compute.struct_field(column, name) if pyarrow.types.is_struct(column.type) else column


def _fields(kind: pa.DataType) -> dict[str, pa.DataType]:
    """Return the types of a struct's fields; empty for any other type."""
    import pyarrow

    return {field.name: field.type for field in kind} if pyarrow.types.is_struct(kind) else {}


def _is_kept(column: pa.Field) -> bool:
    """Return True if a column has text, numbers, dates or times, or is ``custom``, where NeMo looks for ``_skipme``."""
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    is_span = types.is_duration(kind) or types.is_interval(kind)
    is_value = types.is_null(kind) or types.is_decimal(kind) or (types.is_primitive(kind) and not is_span)
    return str(kind) in _TEXTS or is_value or (column.name == "custom" and types.is_struct(kind))
