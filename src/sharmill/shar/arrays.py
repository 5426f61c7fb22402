"""Arrays of a shard: ``.npy`` files, which never have pickled objects, and the type and length of codes."""

import io
import math
import tokenize
from functools import lru_cache
from typing import Any

import numpy as np

from sharmill.audio.resample import resampled_length
from sharmill.errors import ConfigError, DamagedShard

_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# numpy parses a header as Python; MemoryError is the parser's word for brackets within brackets.
_NO_HEADER = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError, SyntaxError, tokenize.TokenError,
    RecursionError, MemoryError,
)  # fmt: skip


def num_frames(recording: dict[str, Any], sampling_rate: int, samples_per_frame: int) -> int:
    """Return ceil(samples at the rate of a codec / samples of its frames) of the audio that a Recording describes.

    Raises:
        LookupError, TypeError: it does not say how many samples there are, or at which rate.
    """
    samples = resampled_length(recording["num_samples"], recording["sampling_rate"], sampling_rate)
    return -(-samples // samples_per_frame)


def codes_dtype(codebook_size: int) -> np.dtype:
    """Return the smallest of int16, int32 and int64 that holds every code.

    Raises:
        ConfigError: none does.

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
    """Return the array of an ``.npy`` file; pickled objects are refused.

    ``np.load`` would also take archives of arrays, ignore what follows the array, and reserve whatever memory a header
    asks for.

    Raises:
        DamagedShard: it is not one; ``where`` says what in the message.
    """
    dtype, shape, column_major, start = array_layout(data, where)
    try:
        return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if column_major else "C")
    except ValueError as error:  # an array without numbers may have any shape in its header
        raise DamagedShard(f"{where}: {error}") from error


def array_layout(data: bytes, where: str) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    """Return type, shape, Fortran order and the position of the numbers of an ``.npy`` file that has them all.

    Raises:
        DamagedShard: as ``array_from_bytes``.
    """
    try:
        # Most arrays of a dataset share a few headers, and numpy parses one as Python.
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
    """Return type, shape, Fortran order and the position of the numbers, and the size of the whole file."""
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    if version not in _READ_HEADER:
        raise ValueError(f"arrays of version {version} are not read")
    shape, column_major, dtype = _READ_HEADER[version](stream)
    if dtype.hasobject:
        raise ValueError("the array has pickled objects")
    if min(shape, default=0) < 0 or not dtype.itemsize:
        raise ValueError(f"there is no array of shape {shape} and type {dtype}")
    start = stream.tell()
    return (dtype, shape, column_major, start), start + math.prod(shape) * dtype.itemsize
