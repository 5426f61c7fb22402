"""The codes of segments in the run directory: a file for each block of segments, and reading of single segments.

A file is a table and the codes of each segment behind it, codebook by codebook. The table has the position of the codes
of each segment and their checksum, and at its end where the codes end and a checksum of the table itself, which single
segments are read without: in a wrong place are other codes. Behind the codes are counts: how often each code occurs in
each codebook.
"""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np
import xxhash

from sharmill.engine.rundir import StageDir
from sharmill.engine.stored import decode_stored, load_stored_array, read_stored
from sharmill.errors import UnitFailed
from sharmill.shar.arrays import codes_dtype
from sharmill.shar.index import CodecRecord
from sharmill.storage import damaged_file, open_stored

_ENTRY: Final = np.dtype([("position", "<i8"), ("xxh3", "<u8")])
_COUNT: Final = np.dtype("<i8")
# Files of codes that a rank keeps open: a tenth or a quarter of the usual limits.
_KEPT_OPEN: Final = 256
# Codebooks times their size: codecs with more codes are not counted.
_MAX_COUNTS: Final = 1 << 21


class EncodedRecord(msgspec.Struct, frozen=True):
    """The outcome of a stage ``encode``: codec, None where there are no segments, and checksum of all codes.

    ``counts`` has how often each code occurs in the segments, packed, or is "" where that was not counted.
    """

    codec: CodecRecord | None
    codes: str
    counts: str = ""


def codes_file(block: int) -> str:
    """Return the path of the codes of a block, relative to the folder of the stage."""
    return f"parts/{block:06d}.codes"


def encoded_file(paths: StageDir) -> Path:
    """Return the path of the ``EncodedRecord`` of a stage."""
    return paths.merged / "codes.json"


def bounds_file(plan: Path) -> Path:
    """Return the path of the bounds of the blocks, in a folder of the plan."""
    return plan / "bounds.npy"


def read_encoded(paths: StageDir) -> EncodedRecord:
    """Read the outcome of a finished stage."""
    return decode_stored(encoded_file(paths), read_stored(encoded_file(paths)), EncodedRecord)


def write_codes(path: Path, codes: Sequence[np.ndarray], codebook_size: int) -> None:
    """Write the codes (codebooks, frames) of the segments of a block, in their order, and their counts."""
    table = np.empty(len(codes) + 1, _ENTRY)
    table["position"] = table.nbytes + np.concatenate([[0], np.cumsum([array.nbytes for array in codes])])
    table["xxh3"][:-1] = [xxhash.xxh3_64_intdigest(array.tobytes()) for array in codes]
    table["xxh3"][-1] = _hash_table(table)
    with path.open("wb") as stream:
        stream.write(table.tobytes())
        for array in codes:
            stream.write(array.tobytes())
        if len(codes[0]) * codebook_size <= _MAX_COUNTS:
            books = (np.concatenate([array[book] for array in codes]) for book in range(len(codes[0])))
            counts = np.stack([np.bincount(book, minlength=codebook_size) for book in books])
            stream.write(zlib.compress(counts.astype(_COUNT).tobytes(), 6))


def add_counts(paths: StageDir, num_blocks: int, codec: CodecRecord) -> str:
    """Return how often each code occurs in all blocks, packed; "" where that was not counted in all of them.

    Raises:
        ConfigError: a file is damaged.
    """
    size = codec.num_codebooks * codec.codebook_size
    total = np.zeros(size if size <= _MAX_COUNTS else 0, _COUNT)
    for block in range(num_blocks if len(total) else 0):
        path = paths.path / codes_file(block)
        try:
            with open_stored(path) as stream:
                # The table ends where the first codes begin, and its last entry has where the last ones end.
                for shift in (_ENTRY.itemsize, 0):
                    (position,) = np.frombuffer(stream.read(_ENTRY.itemsize), _ENTRY)["position"].tolist()
                    stream.seek(max(0, position - shift))
                packed = stream.read()
            if not packed:
                return ""
            total += _unpack_counts(packed)
        except (ValueError, zlib.error) as error:
            raise damaged_file(path, f"the counts of its codes: {error}") from error
    return base64.b64encode(zlib.compress(total.tobytes(), 6)).decode() if len(total) else ""


def read_counts(paths: StageDir) -> np.ndarray | None:
    """Return how often each code occurs in all segments (codebooks, codebook size); None where it was not counted.

    Raises:
        ConfigError: the record is damaged.
    """
    encoded = read_encoded(paths)
    if encoded.codec is None or not encoded.counts:
        return None
    shape = encoded.codec.num_codebooks, encoded.codec.codebook_size
    try:
        return _unpack_counts(base64.b64decode(encoded.counts)).reshape(shape)
    except (ValueError, zlib.error) as error:
        raise damaged_file(encoded_file(paths), f"the counts of the codes: {error}") from error


def _unpack_counts(packed: bytes) -> np.ndarray:
    # No more than there can be: a damaged text could unfold to gigabytes.
    return np.frombuffer(zlib.decompressobj().decompress(packed, _COUNT.itemsize * _MAX_COUNTS), _COUNT)


def _hash_table(table: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(table[:-1].tobytes() + table["position"][-1].tobytes())


class SegmentCodes:
    """The codes of all segments, by their numbers.

    Of a file no more is read than the places and the codes of the segments that are asked for. The first files stay
    open, so that they are opened once however often segments are asked for.

    Args:
        paths: the folder of the stage that made them.
        codec: what the codes are of.
    """

    def __init__(self, paths: StageDir, codec: CodecRecord) -> None:
        self._folder = paths.path
        self._bounds = load_stored_array(bounds_file(paths.plan))
        self._num_codebooks = codec.num_codebooks
        self._dtype = codes_dtype(codec.codebook_size).newbyteorder("<")
        self._kept: dict[int, BinaryIO] = {}

    def read(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield segments and their codes (codebooks, frames); ``numbers`` are sorted, and each file is read forward.

        Raises:
            UnitFailed: a file is not there, or damaged.
        """
        blocks = np.searchsorted(self._bounds, numbers, side="right") - 1
        for block in np.unique(blocks).tolist():
            wanted = numbers[blocks == block] - self._bounds[block]
            with ExitStack() as stack:
                # One that cannot be read is closed, and opened again the next time.
                stream = self._kept.pop(block, None) or open_stored(self._folder / codes_file(block))
                yield from self._read_block(block, stack.enter_context(stream), wanted)
                if len(self._kept) < _KEPT_OPEN:
                    self._kept[block] = stream
                    stack.pop_all()

    def close(self) -> None:
        """Close the files that were kept open."""
        for stream in self._kept.values():
            stream.close()
        self._kept = {}

    def _read_block(self, block: int, stream: BinaryIO, wanted: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield segments of a block and their codes; ``wanted`` counts from its first one."""
        path, first, file = self._folder / codes_file(block), int(self._bounds[block]), stream.fileno()
        size = os.fstat(file).st_size
        for index in wanted.tolist():
            entries = os.pread(file, 2 * _ENTRY.itemsize, index * _ENTRY.itemsize)
            if len(entries) < 2 * _ENTRY.itemsize:
                raise _damaged(path)
            (position, expected), (end, _) = np.frombuffer(entries, _ENTRY).tolist()
            data = os.pread(file, end - position, position) if 0 <= position <= end <= size else b""
            # Of a damaged table too, as it has then other codes at the place.
            if xxhash.xxh3_64_intdigest(data) != expected:
                raise _damaged(path)
            yield first + index, np.frombuffer(data, self._dtype).reshape(self._num_codebooks, -1)


def _damaged(path: Path) -> UnitFailed:
    return UnitFailed(
        f"{path} is damaged: remove it and run the stage encode, which makes it again", code="damaged_run_dir"
    )
