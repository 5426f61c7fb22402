"""The files of codes in the run directory, one for each block of segments, and the outcome of a stage ``encode``.

A file is a table and the codes of each segment behind it, codebook by codebook. The table has the position of the codes
of each segment and their checksum, and at its end where the codes end and a checksum of the table itself, which single
segments are read without: in a wrong place are other codes. Behind the codes are counts: how often each code occurs in
each codebook.
"""

import base64
import os
import resource
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np
import xxhash

from sharmill.engine.run_dir import StageDir
from sharmill.errors import UnitFailed
from sharmill.files.arrays import load_stored_array
from sharmill.files.atomic import open_new
from sharmill.files.stored import damaged_file, open_stored, read_record
from sharmill.shar.arrays import codes_dtype
from sharmill.shar.index import CodecRecord

# The bounds of the blocks, in the folder of the plan.
BOUNDS_FILE: Final = "bounds.npy"
_ENTRY: Final = np.dtype([("position", "<i8"), ("xxh3", "<u8")])
_COUNT: Final = np.dtype("<i8")
# Codebooks times their size: codecs with more codes are not counted.
_MAX_COUNTS: Final = 1 << 21
# Files of codes that a rank keeps open at most, if its limit allows: those of 32,768 hours in blocks of two.
_MOST_KEPT: Final = 1 << 14
# Bytes between two ranges of a file that take no longer to read and drop than another read of a cached file.
_GAP: Final = 1 << 14
# Bytes of neighbouring ranges that are read at once.
_AT_ONCE: Final = 1 << 20


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


def write_codes(path: Path, codes: Sequence[np.ndarray], codebook_size: int) -> None:
    """Write the codes (codebooks, frames) of the segments of a block, in their order, and their counts.

    A segment without codes has an array without frames.
    """
    table = np.empty(len(codes) + 1, _ENTRY)
    table["position"] = table.nbytes + np.concatenate([[0], np.cumsum([array.nbytes for array in codes])])
    table["xxh3"][:-1] = [xxhash.xxh3_64_intdigest(array.tobytes()) for array in codes]
    table["xxh3"][-1] = xxhash.xxh3_64_intdigest(table[:-1].tobytes() + table["position"][-1].tobytes())
    with open_new(path) as stream:
        stream.write(table.tobytes())
        for array in codes:
            stream.write(array.tobytes())
        if len(codes[0]) * codebook_size <= _MAX_COUNTS:
            books = (np.concatenate([array[book] for array in codes]) for book in range(len(codes[0])))
            counts = np.stack([np.bincount(book, minlength=codebook_size) for book in books])
            stream.write(zlib.compress(counts.astype(_COUNT).tobytes(), 6))


def add_counts(paths: StageDir, num_blocks: int, codec: CodecRecord) -> str:
    """Return how often each code occurs in all blocks, packed; "" where there are too many codes to count.

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
            total += _unpack_counts(packed)
        except (ValueError, zlib.error) as error:
            raise damaged_file(path, f"the counts of its codes: {error}") from error
    return base64.b64encode(zlib.compress(total.tobytes(), 6)).decode() if len(total) else ""


def read_counts(paths: StageDir) -> np.ndarray | None:
    """Return how often each code occurs in all segments (codebooks, codebook size); None where it was not counted.

    Args:
        paths: the folder of a stage ``encode``, which need not be finished.

    Raises:
        ConfigError: the record is damaged.
    """
    encoded = read_record(encoded_file(paths), EncodedRecord)
    if encoded is None or encoded.codec is None or not encoded.counts:
        return None
    shape = encoded.codec.num_codebooks, encoded.codec.codebook_size
    try:
        return _unpack_counts(base64.b64decode(encoded.counts)).reshape(shape)
    except (ValueError, zlib.error) as error:
        raise damaged_file(encoded_file(paths), f"the counts of the codes: {error}") from error


def _unpack_counts(packed: bytes) -> np.ndarray:
    # No more than there can be: a damaged text could unfold to gigabytes.
    return np.frombuffer(zlib.decompressobj().decompress(packed, _COUNT.itemsize * _MAX_COUNTS), _COUNT)


def _num_kept(num_files: int) -> int:
    """Return how many of so many files may stay open: half of the limit, which is raised for this process if needed."""
    wanted = min(num_files, _MOST_KEPT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (hard, resource.RLIM_INFINITY) and soft < 2 * wanted:
        soft = 2 * wanted if hard == resource.RLIM_INFINITY else min(2 * wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft // 2)


def _read_ranges(file: int, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the bytes of ranges (start, stop) of a file; those that lie close behind each other are read at once."""
    begin = 0
    while begin < len(ranges):
        first, last = ranges[begin]
        end = begin + 1
        while end < len(ranges) and first <= ranges[end][0] <= last + _GAP and ranges[end][1] <= first + _AT_ONCE:
            last = max(last, ranges[end][1])
            end += 1
        data = os.pread(file, last - first, first)
        yield from (data[start - first : stop - first] for start, stop in ranges[begin:end])
        begin = end


class SegmentCodes:
    """The codes of all segments, by their numbers.

    Of a file little more is read than the places and the codes of the segments that are asked for. The first files stay
    open, as many as the limit of open files allows, so that they are opened once however often segments are asked for.

    Args:
        paths: the folder of the stage that made them.
        codec: what the codes are of.
    """

    def __init__(self, paths: StageDir, codec: CodecRecord) -> None:
        self._folder = paths.path
        self._bounds = load_stored_array(paths.plan / BOUNDS_FILE)
        self._num_codebooks = codec.num_codebooks
        self._dtype = codes_dtype(codec.codebook_size).newbyteorder("<")
        self._num_kept = _num_kept(len(self._bounds) - 1)
        self._kept: dict[int, BinaryIO] = {}

    def read(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield segments and their codes (codebooks, frames); ``numbers`` are sorted, and each file is read forward.

        Raises:
            UnitFailed: a file is not there, or damaged.
        """
        blocks = np.searchsorted(self._bounds, numbers, side="right") - 1
        starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
        for begin, end in pairwise([*starts, len(blocks)]):
            block = int(blocks[begin])
            with ExitStack() as stack:
                # A file that cannot be read is closed, and opened again the next time.
                stream = self._kept.pop(block, None) or open_stored(self._folder / codes_file(block), buffering=0)
                yield from self._read_block(block, stack.enter_context(stream), numbers[begin:end])
                if len(self._kept) < self._num_kept:
                    self._kept[block] = stream
                    stack.pop_all()

    def close(self) -> None:
        """Close the files that were kept open."""
        for stream in self._kept.values():
            stream.close()

    def _read_block(self, block: int, stream: BinaryIO, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield segments of a block and their codes."""
        path, file, size = self._folder / codes_file(block), stream.fileno(), _ENTRY.itemsize
        # The entry behind a segment's own has where its codes end.
        starts = (size * (numbers - self._bounds[block])).tolist()
        table = b"".join(_read_ranges(file, [(start, start + 2 * size) for start in starts]))
        if len(table) < 2 * size * len(numbers):
            raise _damaged(path)
        entries = np.frombuffer(table, _ENTRY).reshape(-1, 2)
        places = [(start, stop) for start, stop in entries["position"].tolist()]
        end = os.fstat(file).st_size
        if not all(0 <= start <= stop <= end for start, stop in places):
            raise _damaged(path)
        found = zip(numbers.tolist(), entries["xxh3"][:, 0].tolist(), _read_ranges(file, places), strict=True)
        for number, expected, data in found:
            # A damaged table shows here too: it has other codes at the place.
            if xxhash.xxh3_64_intdigest(data) != expected:
                raise _damaged(path)
            yield number, np.frombuffer(data, self._dtype).reshape(self._num_codebooks, -1)


def _damaged(path: Path) -> UnitFailed:
    return UnitFailed(
        f"{path} is damaged: remove it and run the stage encode, which makes it again", code="damaged_run_dir"
    )
