"""Arrays in files of run directories (``.npy``)."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from sharmill.files.atomic import open_new
from sharmill.files.stored import damaged_file, open_stored

# So does numpy for a file that is no array.
_NOT_AN_ARRAY: Final = (ValueError, TypeError, LookupError, EOFError, SyntaxError, RecursionError, MemoryError)
# Of an array that is read as a whole: a part of a stage, or the bounds of blocks.
_MAX_ARRAY_BYTES: Final = 1 << 30


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
            # By its descriptor, which was checked.
            return np.lib.format.open_memmap(f"/proc/self/fd/{stream.fileno()}", mode="r")
        except _NOT_AN_ARRAY as error:
            raise damaged_file(path, str(error)) from error


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array as an ``.npy`` file. Where the disk is full, ``np.save`` raises an error that does not say so."""
    with open_new(path) as stream:
        write_array(stream, array.dtype, array.shape, [array])


def write_array(stream: BinaryIO, dtype: np.dtype, shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> None:
    """Write an ``.npy`` file whose content comes in parts."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    for part in parts:
        stream.write(np.ascontiguousarray(part, dtype).data)
