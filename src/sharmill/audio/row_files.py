"""Files of rows, parquet and Arrow: their columns, read one row group or record batch at a time.

A file is known by its content, whatever its name. pyarrow is imported where a file is opened.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from sharmill.errors import RejectRecord
from sharmill.files.storage import open_regular

if TYPE_CHECKING:
    import pyarrow as pa

# Of audio, and always the last group.
_KEPT_BYTES: Final = 256 << 20
_OPEN_FILES: Final = 8
_PARQUET: Final = b"PAR1"
_PARQUET_ENCRYPTED: Final = b"PARE"
_DECRYPT: Final = "store it without encryption, and name that file"
_UPDATE: Final = "it is newer than the installed pyarrow: update that, or write the file anew"
_ARROW_FILE: Final = b"ARROW1"
# What pyarrow raises of a file that is not as it should be; ArrowInvalid is a ValueError.
_DAMAGE: Final = (OSError, ValueError, NotImplementedError, KeyError, IndexError)


class UnreadableRows(Exception):
    """A file of rows, or a group of them, that cannot be read; the message says why."""


class RowFile(ABC):
    """An open file of rows: its schema, and the number of rows of each of its groups."""

    schema: pa.Schema
    group_sizes: list[int]

    @abstractmethod
    def read(self, group: int, columns: list[str]) -> pa.Table:
        """Return columns of a group; a column of structs may be named with one of its fields, ``audio.bytes``."""

    def num_nulls(self, group: int, column: str) -> int | None:
        """Return how many values of a column, or of a field of it, are null; None where only reading them tells."""
        return None

    def num_bytes(self, group: int, column: str) -> int:
        """Return how many bytes of memory a column of a group takes; 0 where it is mapped."""
        return 0


class _ParquetFile(RowFile):
    """A parquet file; its groups are row groups."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(path)
        # Of a file with encrypted columns the footer is signed; pyarrow ends the process where their metadata is asked.
        if self._file.metadata.serialized_size != _footer_size(path):
            raise UnreadableRows(f"{path} has encrypted columns; {_DECRYPT}")
        self.schema = self._file.schema_arrow
        metadata = self._file.metadata
        self.group_sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def read(self, group: int, columns: list[str]) -> pa.Table:
        return self._file.read_row_group(group, columns=columns, use_threads=False)

    def num_nulls(self, group: int, column: str) -> int | None:
        chunks = self._file.metadata.row_group(group)
        for number in range(chunks.num_columns):
            chunk = chunks.column(number)
            if chunk.path_in_schema == column:
                statistics = chunk.statistics
                return statistics.null_count if statistics is not None and statistics.has_null_count else None
        return None

    def num_bytes(self, group: int, column: str) -> int:
        chunks = self._file.metadata.row_group(group)
        found = (chunks.column(number) for number in range(chunks.num_columns))
        own = (chunk for chunk in found if chunk.path_in_schema.partition(".")[0] == column)
        return sum(chunk.total_uncompressed_size for chunk in own)


def _footer_size(path: Path) -> int:
    """Return how many bytes lie between the rows of a parquet file and its end mark."""
    with open_regular(path) as stream:
        stream.seek(-8, os.SEEK_END)
        return int.from_bytes(stream.read(4), "little")


class _ArrowFile(RowFile):
    """An Arrow file, which is mapped into memory; its groups are record batches."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        self._reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        self.schema = self._reader.schema
        self.group_sizes = [self._reader.get_batch(group).num_rows for group in range(self._reader.num_record_batches)]

    def read(self, group: int, columns: list[str]) -> pa.Table:
        return _select(self._reader.get_batch(group), columns)


class _ArrowStream(RowFile):
    """A stream of Arrow in a file, which is mapped into memory; its groups are record batches."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        self._ipc = pyarrow.ipc
        self._mapped = pyarrow.memory_map(str(path))
        self.schema = self._ipc.read_schema(self._mapped)
        self._lock = Lock()
        self._places: list[int] = []
        self.group_sizes = []
        size = self._mapped.size()
        while (place := self._mapped.tell()) < size:
            try:
                message = self._ipc.read_message(self._mapped)
            except EOFError:  # its end mark
                break
            if message.type != "record batch":
                raise ValueError(f"it has a message of the type {message.type}; write it as parquet")
            self._places.append(place)
            self.group_sizes.append(self._ipc.read_record_batch(message, self.schema).num_rows)
        else:
            raise ValueError("it ends without an end mark; it is cut off")

    def read(self, group: int, columns: list[str]) -> pa.Table:
        with self._lock:
            self._mapped.seek(self._places[group])
            message = self._ipc.read_message(self._mapped)
        return _select(self._ipc.read_record_batch(message, self.schema), columns)


def _select(batch: pa.RecordBatch, columns: list[str]) -> pa.Table:
    import pyarrow

    names = [name if name in batch.schema.names else name.rpartition(".")[0] for name in columns]
    return pyarrow.Table.from_batches([batch.select(list(dict.fromkeys(names)))])


def open_rows(path: Path) -> RowFile:
    """Open a file of rows.

    Raises:
        UnreadableRows: it is missing, encrypted, cut off, or neither parquet nor Arrow.
    """
    try:
        with open_regular(path) as stream:
            magic = stream.read(8)
    except ValueError as error:
        raise UnreadableRows(f"{path}: {error}") from error
    except OSError as error:
        raise UnreadableRows(f"{path}: {error.strerror}") from error
    if magic.startswith(_PARQUET_ENCRYPTED):
        raise UnreadableRows(f"{path} is encrypted; {_DECRYPT}")
    kind = _ParquetFile if magic.startswith(_PARQUET) else _ArrowFile if magic.startswith(_ARROW_FILE) else _ArrowStream
    try:
        return kind(path)
    except _DAMAGE as error:
        name = {_ParquetFile: "parquet", _ArrowFile: "an Arrow file", _ArrowStream: "parquet or Arrow"}[kind]
        remedy = _UPDATE if "nsupported future" in str(error) else "copy it again, or take it out of sources"
        raise UnreadableRows(f"{path} cannot be read as {name}: {_line(error)}; {remedy}") from error


def read_rows(file: RowFile, group: int, columns: list[str]) -> pa.Table:
    """Return columns of a group of rows; raise UnreadableRows where it is damaged or encrypted."""
    try:
        return file.read(group, columns)
    except _DAMAGE as error:
        raise UnreadableRows(f"its rows cannot be read: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def audio_bytes(schema: pa.Schema, column: str) -> str | None:
    """Return the column, or its field, that has the bytes of audio, such as ``audio.bytes``; None without bytes."""
    from pyarrow import types

    kind = schema.field(column).type
    if types.is_struct(kind):
        return f"{column}.bytes" if kind.get_field_index("bytes") >= 0 else None
    return None if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) else column


def file_state(path: Path) -> tuple[int, int] | None:
    """Return what tells a file that was replaced from the one before; None of one that is not there."""
    try:
        status = path.stat()
    except OSError:  # opening it says why
        return None
    return status.st_size, status.st_mtime_ns


class RecentRows:
    """The files that were opened last, and the audio columns that were read last, as many as fit into some bytes."""

    def __init__(self, max_bytes: int = _KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._files: OrderedDict[Any, tuple[RowFile, list[int]]] = OrderedDict()
        self._columns: OrderedDict[Any, pa.ChunkedArray] = OrderedDict()
        # Held while a group is read: another thread that asks probably wants the same.
        self._lock = Lock()

    def file(self, path: Path) -> RowFile:
        """Return an open file; raise UnreadableRows where it cannot be opened."""
        with self._lock:
            return self._open(path)[0]

    def table(self, path: Path, columns: list[str], group: int) -> pa.Table:
        """Return columns of a group of rows; raise UnreadableRows where they cannot be read."""
        with self._lock:
            return read_rows(self._open(path)[0], group, columns)

    def audio(self, path: Path, column: str, group: int) -> pa.ChunkedArray:
        """Return the bytes of the audio of a group of rows; raise UnreadableRows where they cannot be read."""
        with self._lock:
            return self._audio(path, column, group)

    def value(self, path: Path, column: str, row: int) -> bytes | None:
        """Return the bytes of the audio of a row, None where there are none.

        Raises:
            UnreadableRows: they cannot be read, or there is no such row.
        """
        with self._lock:
            _, starts = self._open(path)
            group = bisect_right(starts, row) - 1
            if row >= starts[-1]:
                raise UnreadableRows(f"{path} has {starts[-1]} rows, and no row {row}")
            return self._audio(path, column, group)[row - starts[group]].as_py()

    def _open(self, path: Path) -> tuple[RowFile, list[int]]:
        """Return an open file, and the number of the first row of each group, with that of all rows behind."""
        key = (path, file_state(path))
        if key not in self._files:
            file = open_rows(path)
            self._files[key] = file, list(accumulate(file.group_sizes, initial=0))
            while len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(key)
        return self._files[key]

    def _audio(self, path: Path, column: str, group: int) -> pa.ChunkedArray:
        import pyarrow.compute

        key = (path, file_state(path), column, group)
        if key not in self._columns:
            file, _ = self._open(path)
            name = audio_bytes(file.schema, column)
            if name is None:
                raise UnreadableRows(f"the column {column!r} of {path} has no bytes")
            values = read_rows(file, group, [name]).column(0)
            self._columns[key] = values if name == column else pyarrow.compute.struct_field(values, "bytes")
            while len(self._columns) > 1 and sum(kept.nbytes for kept in self._columns.values()) > self._max_bytes:
                self._columns.popitem(last=False)
        self._columns.move_to_end(key)
        return self._columns[key]


recent_rows: Final = RecentRows()


def is_mapped(path: Path) -> bool:
    """Return True of an Arrow file, of which a row is read alone, and of one that cannot be opened."""
    try:
        return not isinstance(recent_rows.file(path), _ParquetFile)
    except UnreadableRows:
        return True


def read_audio(path: Path, column: str, row: int, size: int) -> bytes:
    """Return the audio file that a row has in a column.

    Raises:
        RejectRecord: missing_audio or unreadable_audio where there is no such file or row, changed_audio where the row
            has another number of bytes than ``size``.
    """
    if not path.exists():
        raise RejectRecord("missing_audio", f"{path} is not there")
    try:
        data = recent_rows.value(path, column, row)
    except UnreadableRows as error:
        raise RejectRecord("unreadable_audio", str(error)) from error
    if data is None or len(data) != size:
        found = "no" if data is None else len(data)
        raise RejectRecord("changed_audio", f"row {row} of {path} has {found} bytes of audio, and had {size}")
    return data
