"""Reading of Parquet and Arrow files, one row group or record batch at a time.

The format is detected from the content, not from the file name. pyarrow is imported only when a file is opened.
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
# This lock is held while a group is read. A thread that waits for it probably needs the same group, which is cached.
_reading: Final = Lock()
# Errors that pyarrow raises for damaged files; ArrowInvalid is a ValueError.
_DAMAGE: Final = (OSError, ValueError, NotImplementedError, KeyError, IndexError)


class UnreadableRows(Exception):
    """A Parquet or Arrow file, or a group of its rows, cannot be read; the message says why."""


class RowFile:
    """An open Parquet or Arrow file. Its groups are row groups (Parquet) or record batches (Arrow).

    Args:
        schema: the schema of the columns.
        group_sizes: the number of rows in each group.
        read: a function (group, columns) -> table.
        metadata: the metadata of a Parquet file; None for Arrow.

    Attributes:
        is_mapped: True for an Arrow file, whose rows can be read one by one.
        starts: the number of the first row of each group, followed by the number of rows in the file.
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
        """Return columns of a group. A name such as ``audio.bytes`` selects one field of a struct column.

        Raises:
            UnreadableRows: the group is damaged or encrypted.
        """
        try:
            with self._lock:
                return self._read(group, columns)
        except _DAMAGE as error:
            raise UnreadableRows(f"its rows cannot be read: {one_line(error)}") from error

    def audio_bytes(self, column: str) -> str | None:
        """Return the name that ``read`` takes for a column's bytes, such as ``audio.bytes``; None if there are none."""
        from pyarrow import types

        kind = self.schema.field(column).type
        if types.is_struct(kind):
            return f"{column}.bytes" if kind.get_field_index("bytes") >= 0 else None
        return None if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) else column

    def num_nulls(self, group: int, column: str) -> int | None:
        """Return the number of nulls in a column (or a field of it) of a group; None if the file does not state it."""
        chunk = next((chunk for chunk in self._chunks(group) if chunk.path_in_schema == column), None)
        statistics = None if chunk is None else chunk.statistics
        return statistics.null_count if statistics is not None and statistics.has_null_count else None

    def num_bytes(self, group: int, column: str) -> int:
        """Return the memory that a column of a group takes, in bytes; 0 for a mapped file."""
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
    """Open a Parquet or Arrow file. The most recently used files stay open and are reused.

    Raises:
        UnreadableRows: the file is missing, encrypted, truncated, or neither Parquet nor Arrow.
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
            # The footer of a file with encrypted columns is signed, and thus longer than the metadata. pyarrow would
            # crash if it read the metadata of these columns.
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
            raise ValueError("it is truncated: the end-of-stream marker is missing")
        batches = table.to_batches()
        sizes = [batch.num_rows for batch in batches]
        return RowFile(table.schema, sizes, lambda group, columns: _select(batches[group], columns))
    except _DAMAGE as error:
        remedy = (
            "it is newer than the installed pyarrow: update pyarrow, or write the file again"
            if "nsupported future" in str(error)
            else "copy it again, or remove it from sources"
        )
        raise UnreadableRows(f"{path} cannot be read as {kind}: {one_line(error)}; {remedy}") from error


def file_state(path: Path) -> tuple[int, int] | None:
    """Return a file's size in bytes and modification time in ns, which change if it is replaced; None if missing."""
    try:
        status = path.stat()
    except OSError:  # the error is reported when the file is opened
        return None
    return status.st_size, status.st_mtime_ns


def read_audio_column(path: Path, column: str, group: int) -> pa.ChunkedArray:
    """Return the audio bytes of all rows in a group. The most recently read group is kept in memory.

    Raises:
        UnreadableRows: the rows cannot be read.
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
    """Return the bytes of the audio file that is stored in a row.

    Raises:
        RejectRecord: missing_audio if the container does not exist; unreadable_audio if it has no such row or its rows
            cannot be read; changed_audio if the number of bytes differs from ``member.size``.
    """
    refuse_record((not path.exists(), "missing_audio", f"{path} does not exist"))
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
    detail = f"row {member.start} of {path} has {found} bytes of audio instead of {member.size}"
    refuse_record((found != member.size, "changed_audio", detail))
    return data
