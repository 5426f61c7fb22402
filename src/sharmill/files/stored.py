"""Files of a run directory: records that are appended, and reading what others may have written or replaced.

Only regular files of a bounded size are read, and what they hold is decoded to a known type; links are not followed.
Folders above them are checked by ``sharmill.engine.fence``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, TypeVar
from uuid import uuid4

import msgspec
import numpy as np
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_fixed

from sharmill.files.storage import damaged_file, fsync_directory, open_stored, stopping_errors

Decoded = TypeVar("Decoded")
# msgspec raises RecursionError for JSON that is nested too deeply.
NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# So does numpy for a file that is no array.
_NOT_AN_ARRAY: Final = (ValueError, TypeError, LookupError, EOFError, SyntaxError, RecursionError, MemoryError)
_MAX_BYTES: Final = 64 << 20
# Of an array that is read as a whole: a part of a stage, or the bounds of blocks.
_MAX_ARRAY_BYTES: Final = 1 << 30


def _is_stale(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ESTALE


# On NFS another node may replace a file while it is read: opened once more it is the new one.
@retry(retry=retry_if_exception(_is_stale), stop=stop_after_attempt(3), wait=wait_fixed(0.1), reraise=True)
def read_stored(path: Path) -> bytes:
    """Return the content of a small file of a run directory; raises as ``open_stored``, and where it is too large."""
    with open_stored(path) as stream:
        data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise damaged_file(path, f"it is larger than {_MAX_BYTES >> 20} MiB")
    return data


def read_stored_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of a run directory with their ends; one that is too long comes in parts."""
    with open_stored(path) as stream:
        yield from iter(partial(stream.readline, _MAX_BYTES), b"")


class RecordLog:
    """Appends records, a line of JSON each, to a ``.jsonl`` file that this process alone writes.

    Args:
        folder: that of the file, beside those of other processes; it is there as long as the plan is the present one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def append(self, record: msgspec.Struct, *, synced: bool = False) -> None:
        """Append a record; it is in the file when this returns, and with ``synced`` on disk.

        Raises:
            FatalError: it cannot be written.
        """
        is_new = self._path is None
        # Kept only after a success: after a failed write the file may end in half a line, and gets no more.
        path, self._path = self._path or self._folder / f"{uuid4().hex}.jsonl", None
        with stopping_errors(path), open_stored(path, append=True) as stream:
            stream.write(msgspec.json.encode(record) + b"\n")
            if synced:
                stream.flush()
                os.fsync(stream.fileno())
                if is_new:
                    fsync_directory(self._folder)
        self._path = path


class Tail:
    """Reads the ``.jsonl`` files of a folder to which processes append, each byte once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}

    def lines(self) -> Iterator[tuple[Path, bytes]]:
        """Yield the complete lines that are new since the last call, with their files."""
        for path in sorted(self._folder.glob("*.jsonl")):
            # Opening makes NFS ask the server for the size too.
            with open_stored(path) as stream:
                stream.seek(self._offsets.get(path.name, 0))
                for line in iter(partial(stream.readline, _MAX_BYTES), b""):
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path.name] = self._offsets.get(path.name, 0) + len(line)
                    yield path, line


def decode_stored(path: Path, data: bytes, kind: type[Decoded]) -> Decoded:
    """Decode JSON that a file of a run directory has.

    Raises:
        ConfigError: it is not what it should be.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except NOT_JSON as error:
        raise damaged_file(path, str(error)) from error


def read_record(path: Path, kind: type[Decoded]) -> Decoded | None:
    """Return what a small file of a run directory holds as JSON, or None where it is not there.

    Raises:
        ConfigError: it is not what it should be.
    """
    try:
        return decode_stored(path, read_stored(path), kind)
    except FileNotFoundError:
        return None


def load_stored_array(path: Path) -> np.ndarray:
    """Return the array of a file of a run directory; one with pickled objects is refused.

    Raises:
        ConfigError: it is not an array, or a larger one than any that is read as a whole.
    """
    with open_stored(path) as stream:
        if os.fstat(stream.fileno()).st_size > _MAX_ARRAY_BYTES:
            raise damaged_file(path, f"it is larger than {_MAX_ARRAY_BYTES >> 20} MiB")
        try:
            return np.lib.format.read_array(stream, allow_pickle=False)
        except _NOT_AN_ARRAY as error:
            raise damaged_file(path, str(error)) from error


def map_stored_array(path: Path) -> np.ndarray:
    """Return the array of a file of a run directory without reading it: its bytes are read where they are used.

    Raises:
        ConfigError: it is not an array of numbers.
    """
    with open_stored(path) as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, fortran_order, dtype = read_header[version](stream)
            if dtype.hasobject:
                raise ValueError("it holds Python objects")
            return np.memmap(stream, dtype, "r", offset=stream.tell(), shape=shape, order="F" if fortran_order else "C")
        except _NOT_AN_ARRAY as error:
            raise damaged_file(path, str(error)) from error


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array as an ``.npy`` file. Where the disk is full, ``np.save`` raises an error that does not say so."""
    with path.open("wb") as stream:
        write_array(stream, array.dtype, array.shape, [array])


def write_array(stream: BinaryIO, dtype: np.dtype, shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> None:
    """Write an ``.npy`` file whose content comes in parts."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    for part in parts:
        stream.write(np.ascontiguousarray(part, dtype).data)
