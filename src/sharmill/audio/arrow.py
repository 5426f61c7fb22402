"""Files of rows, parquet and Arrow: their columns, read one row group or record batch at a time.

A file is known by its content, whatever its name. pyarrow is imported where a file is opened.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from sharmill.errors import RejectRecord, one_line, refuse_record
from sharmill.files.regular import open_regular
from sharmill.manifest import Member

if TYPE_CHECKING:
    import pyarrow as pa

_OPEN_FILES: Final = 8
_DECRYPT: Final = "store it without encryption, and name that file"
# Held while a group is read, since another thread that asks probably wants the same.
_reading: Final = Lock()
# Errors that pyarrow raises for a damaged file; ArrowInvalid is a ValueError.
_DAMAGE: Final = (OSError, ValueError, NotImplementedError, KeyError, IndexError)


class UnreadableRows(Exception):
    """A file of rows, or a group of them, that cannot be read; the message says why."""


class RowFile:
    """An open parquet or Arrow file; its groups are row groups or record batches.

    Args:
        schema: of its columns.
        group_sizes: the number of rows of each group.
        read: returns columns of a group.
        metadata: of a parquet file.

    Attributes:
        is_mapped: True of an Arrow file, of which a row is read alone.
        starts: the number of the first row of each group, and behind them that of all rows.
    """

    def __init__(
        self, schema: pa.Schema, group_sizes: list[int], read: Callable[[int, list[str]], pa.Table],
        metadata: Any = None,
    ) -> None:  # fmt: skip
        self.schema = schema
        self.group_sizes = group_sizes
        self.starts = list(accumulate(group_sizes, initial=0))
        self.is_mapped = metadata is None
        self._read = read
        self._metadata = metadata
        self._lock = Lock()

    def read(self, group: int, columns: list[str]) -> pa.Table:
        """Return columns of a group; a column of structs may be named with one of its fields, ``audio.bytes``.

        Raises:
            UnreadableRows: it is damaged or encrypted.
        """
        try:
            with self._lock:
                return self._read(group, columns)
        except _DAMAGE as error:
            raise UnreadableRows(f"its rows cannot be read: {one_line(error)}") from error

    def audio_bytes(self, column: str) -> str | None:
        """Return the column, or its field, that has the bytes of audio, such as ``audio.bytes``; None without bytes."""
        from pyarrow import types

        kind = self.schema.field(column).type
        if types.is_struct(kind):
            return f"{column}.bytes" if kind.get_field_index("bytes") >= 0 else None
        return None if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) else column

    def num_nulls(self, group: int, column: str) -> int | None:
        """Return how many values of a column, or of a field of it, are null; None where only reading them tells."""
        chunk = next((chunk for chunk in self._chunks(group) if chunk.path_in_schema == column), None)
        statistics = None if chunk is None else chunk.statistics
        return statistics.null_count if statistics is not None and statistics.has_null_count else None

    def num_bytes(self, group: int, column: str) -> int:
        """Return how many bytes of memory a column of a group takes; 0 where it is mapped."""
        own = (chunk for chunk in self._chunks(group) if chunk.path_in_schema.partition(".")[0] == column)
        return sum(chunk.total_uncompressed_size for chunk in own)

    def _chunks(self, group: int) -> Iterator[Any]:
        if not self.is_mapped:
            chunks = self._metadata.row_group(group)
            yield from (chunks.column(number) for number in range(chunks.num_columns))


def _select(batch: pa.RecordBatch, columns: list[str]) -> pa.Table:
    import pyarrow

    names = [name if name in batch.schema.names else name.rpartition(".")[0] for name in columns]
    return pyarrow.Table.from_batches([batch.select(list(dict.fromkeys(names)))])


def open_rows(path: Path) -> RowFile:
    """Open a file of rows, or return it as it is where it is one of those that were opened last.

    Raises:
        UnreadableRows: it is missing, encrypted, cut off, or neither parquet nor Arrow.
    """
    return _open(path, file_state(path))


@lru_cache(maxsize=_OPEN_FILES)
def _open(path: Path, state: tuple[int, int] | None) -> RowFile:
    import pyarrow.parquet

    try:
        with open_regular(path) as stream:
            magic = stream.read(8)
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 8))
            end = stream.read()
    except ValueError as error:
        raise UnreadableRows(f"{path}: {error}") from error
    except OSError as error:
        raise UnreadableRows(f"{path}: {error.strerror}") from error
    if magic.startswith(b"PARE"):
        raise UnreadableRows(f"{path} is encrypted; {_DECRYPT}")
    kind = "parquet or Arrow"
    try:
        if magic.startswith(b"PAR1"):
            kind = "parquet"
            file = pyarrow.parquet.ParquetFile(path)
            metadata = file.metadata
            # The footer of a file with encrypted columns is signed; pyarrow ends the process if their metadata is read.
            if metadata.serialized_size != int.from_bytes(end[:4], "little"):
                raise UnreadableRows(f"{path} has encrypted columns; {_DECRYPT}")
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            return RowFile(file.schema_arrow, sizes, partial(file.read_row_group, use_threads=False), metadata)
        if magic.startswith(b"ARROW1"):
            kind = "an Arrow file"
            reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
            sizes = [reader.get_batch(group).num_rows for group in range(reader.num_record_batches)]
            return RowFile(reader.schema, sizes, lambda group, columns: _select(reader.get_batch(group), columns))
        table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
        if end != b"\xff\xff\xff\xff\0\0\0\0":
            raise ValueError("it ends without an end mark; it is cut off")
        batches = table.to_batches()
        sizes = [batch.num_rows for batch in batches]
        return RowFile(table.schema, sizes, lambda group, columns: _select(batches[group], columns))
    except _DAMAGE as error:
        remedy = (
            "it is newer than the installed pyarrow: update that, or write the file anew"
            if "nsupported future" in str(error)
            else "copy it again, or take it out of sources"
        )
        raise UnreadableRows(f"{path} cannot be read as {kind}: {one_line(error)}; {remedy}") from error


def file_state(path: Path) -> tuple[int, int] | None:
    """Return what tells a file that was replaced from the one before; None of one that is not there."""
    try:
        status = path.stat()
    except OSError:  # opening it says why
        return None
    return status.st_size, status.st_mtime_ns


def read_audio_column(path: Path, column: str, group: int) -> pa.ChunkedArray:
    """Return the bytes of the audio of a group of rows; those of the group that was read last are kept.

    Raises:
        UnreadableRows: they cannot be read.
    """
    with _reading:
        return _audio_column(path, file_state(path), column, group)


@lru_cache(maxsize=1)
def _audio_column(path: Path, state: tuple[int, int] | None, column: str, group: int) -> pa.ChunkedArray:
    import pyarrow.compute

    file = open_rows(path)
    name = file.audio_bytes(column)
    if name is None:
        raise UnreadableRows(f"the column {column!r} of {path} has no bytes")
    values = file.read(group, [name]).column(0)
    return values if name == column else pyarrow.compute.struct_field(values, "bytes")


def read_audio(path: Path, member: Member) -> bytes:
    """Return the audio file that a row has in a column.

    Raises:
        RejectRecord: missing_audio or unreadable_audio where there is no such file or row, changed_audio where the row
            has another number of bytes than ``member`` says.
    """
    refuse_record((not path.exists(), "missing_audio", f"{path} is not there"))
    try:
        starts = open_rows(path).starts
        if member.start >= starts[-1]:
            raise UnreadableRows(f"{path} has {starts[-1]} rows, and no row {member.start}")
        group = bisect_right(starts, member.start) - 1
        column = read_audio_column(path, member.kind.partition(":")[2], group)
        data = column[member.start - starts[group]].as_py()
    except UnreadableRows as error:
        raise RejectRecord("unreadable_audio", str(error)) from error
    found = "no" if data is None else len(data)
    detail = f"row {member.start} of {path} has {found} bytes of audio, and had {member.size}"
    refuse_record((found != member.size, "changed_audio", detail))
    return data
