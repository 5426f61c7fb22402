"""Arrays in shards: ``.npy`` data without pickled objects, and the dtype and number of frames of codes."""

import io
import math
import tokenize
from functools import lru_cache
from typing import Any

import numpy as np

from sharmill.audio.resample import resampled_length
from sharmill.errors import ConfigError, DamagedShard

_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# numpy parses a header as a Python literal; the parser raises MemoryError for deeply nested brackets.
_NO_HEADER = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError, SyntaxError, tokenize.TokenError,
    RecursionError, MemoryError,
)  # fmt: skip


def num_frames(recording: dict[str, Any], sampling_rate: int, samples_per_frame: int) -> int:
    """Return the number of codec frames for the audio of a Recording: ceil(samples at the codec's rate / frame size).

    Raises:
        LookupError, TypeError: the Recording lacks the number of samples or the sampling rate.
    """
    samples = resampled_length(recording["num_samples"], recording["sampling_rate"], sampling_rate)
    return -(-samples // samples_per_frame)


def codes_dtype(codebook_size: int) -> np.dtype:
    """Return the smallest of int16, int32 and int64 that holds every code.

    Raises:
        ConfigError: the codebook is too large for int64.

    >>> codes_dtype(2016)
    dtype('int16')
    """
    for dtype in (np.int16, np.int32, np.int64):
        if codebook_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise ConfigError(f"a codebook of {codebook_size} entries is too large", code="bad_codec")


def array_to_bytes(array: np.ndarray) -> bytes:
    """Return an array as the bytes of an ``.npy`` file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def array_from_bytes(data: bytes, where: str) -> np.ndarray:
    """Return the array stored in ``.npy`` data; pickled objects are refused.

    ``np.load`` would also accept archives of arrays, ignore data after the array, and reserve as much memory as a
    header asks for.

    Raises:
        DamagedShard: the data is not a complete array, or contains pickled objects; the message begins with ``where``.
    """
    dtype, shape, column_major, start = array_layout(data, where)
    try:
        return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if column_major else "C")
    except ValueError as error:  # the header of an empty array may contain any shape
        raise DamagedShard(f"{where}: {error}") from error


def array_layout(data: bytes, where: str) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    """Return dtype, shape, whether the values are in Fortran order, and their offset in a complete ``.npy`` file.

    Raises:
        DamagedShard: the data is not a complete array, or contains pickled objects; the message begins with ``where``.
    """
    try:
        # Cache parsed headers: most arrays of a dataset share a few headers, and numpy's parser is slow.
        prefix, length = (10, data[8:10]) if data[6:7] == b"\1" else (12, data[8:12])
        layout, size = _parse_header(bytes(data[: prefix + int.from_bytes(length, "little")]))
        if len(data) != size:
            dtype, shape, _, start = layout
            raise ValueError(f"{len(data) - start} bytes are not an array of shape {shape} and type {dtype}")
        return layout
    except _NO_HEADER as error:
        raise DamagedShard(f"{where}: {error}") from error


@lru_cache(maxsize=4096)
def _parse_header(header: bytes) -> tuple[tuple[np.dtype, tuple[int, ...], bool, int], int]:
    """Return the layout in a header (see ``array_layout``), and the size that the whole file must have in bytes."""
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    if version not in _READ_HEADER:
        raise ValueError(f"arrays of version {version} are not supported")
    shape, column_major, dtype = _READ_HEADER[version](stream)
    if dtype.hasobject:
        raise ValueError("the array contains pickled objects")
    if min(shape, default=0) < 0 or not dtype.itemsize:
        raise ValueError(f"an array cannot have shape {shape} and type {dtype}")
    start = stream.tell()
    return (dtype, shape, column_major, start), start + math.prod(shape) * dtype.itemsize
