"""Arrays stored in run directories as ``.npy`` files."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from sharmill.files.atomic import open_atomic, open_new
from sharmill.files.stored import damaged_file, open_stored

# Errors that numpy raises for a file that is not an array.
_NOT_AN_ARRAY: Final = (ValueError, TypeError, LookupError, EOFError, SyntaxError, RecursionError, MemoryError)
# Maximum size of an array that is read completely.
_MAX_ARRAY_BYTES: Final = 1 << 30


def load_stored_array(path: Path) -> np.ndarray:
    """Read an array from a file of a run directory; raises the errors of ``load_array_and_rest``."""
    return load_array_and_rest(path)[0]


def load_array_and_rest(path: Path) -> tuple[np.ndarray, bytes]:
    """Read an array and the bytes after it from a file of a run directory.

    Raises:
        ConfigError: the content is not an array, has pickled objects, or is too large.
    """
    with open_stored(path) as stream:
        if os.fstat(stream.fileno()).st_size > _MAX_ARRAY_BYTES:
            raise damaged_file(path, f"it is larger than {_MAX_ARRAY_BYTES >> 20} MiB")
        try:
            return np.lib.format.read_array(stream, allow_pickle=False), stream.read()
        except _NOT_AN_ARRAY as error:
            raise damaged_file(path, str(error)) from error


def map_stored_array(path: Path) -> np.ndarray:
    """Map an array in a file of a run directory into memory, so that its bytes are read only when they are used.

    Raises:
        ConfigError: the content is not an array of numbers.
    """
    with open_stored(path) as stream:
        try:
            # The descriptor has been checked, but the path may lead to another file by now.
            return np.lib.format.open_memmap(f"/proc/self/fd/{stream.fileno()}", mode="r")
        except _NOT_AN_ARRAY as error:
            raise damaged_file(path, str(error)) from error


def save_array(path: Path, array: np.ndarray, rest: bytes = b"") -> None:
    """Write an array as an ``.npy`` file. Unlike ``np.save``, this raises a clear error if the disk is full.

    Args:
        rest: bytes to write after the array.
    """
    with open_new(path) as stream:
        write_array(stream, array.dtype, array.shape, [array])
        stream.write(rest)


def publish_array(path: Path, dtype: np.dtype, shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> None:
    """Publish an array as an ``.npy`` file; ``parts`` are consecutive parts of the array."""
    with open_atomic(path) as stream:
        write_array(stream, dtype, shape, parts)


def write_array(stream: BinaryIO, dtype: np.dtype, shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> None:
    """Write an array to a stream in the ``.npy`` format; ``parts`` are consecutive parts of the array."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    for part in parts:
        stream.write(np.ascontiguousarray(part, dtype).data)
