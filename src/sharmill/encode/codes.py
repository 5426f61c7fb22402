"""Codes of segments in the run directory, from which the stage ``encode`` assembles shards.

A block of segments has up to three ``.npy`` files: the codes of its segments, one segment after another, with the codes
of each segment ordered by codebook; a ``CODES`` record for each segment, with which its codes can be read and checked
separately; and the frequency of each code in each codebook, unless the codebooks are very large. At the end, the stage
merges the records of all blocks into one array and sums the frequencies.
"""

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import xxhash

from sharmill.engine.run_dir import StageDir
from sharmill.engine.stage import StageRun
from sharmill.errors import UnitFailed
from sharmill.files.arrays import load_stored_array, map_stored_array, publish_array, save_array
from sharmill.files.staging import Staging
from sharmill.files.stored import damaged_file, open_stored
from sharmill.shar.arrays import codes_dtype
from sharmill.shar.index import CodecRecord

# File in the plan's folder with the bounds of the blocks, as segment numbers.
BOUNDS_FILE: Final = "bounds.npy"
# Byte range of a segment's codes in the file of its block, and the checksum of the codes.
CODES: Final = np.dtype([("start", "<i8"), ("stop", "<i8"), ("xxh3", "<u8")])
# Size of the header of a one-dimensional ``.npy`` file.
_HEADER_BYTES: Final = 128
# Maximum number of codebooks times codebook size for which code frequencies are counted.
_MAX_COUNTS: Final = 1 << 21
# Maximum number of files that a rank keeps open, if its limit on open files permits. It is enough for 32,768 hours of
# audio in blocks of two hours.
_MOST_OPEN: Final = 1 << 14


def _block_file(block: int, content: str = "") -> str:
    """Return the path of a file of a block, relative to the stage's folder.

    Args:
        content: "" for the codes, ".places" for the ``CODES`` records, or ".counts" for the frequencies.
    """
    return f"parts/{block:06d}{content}.npy"


def write_block(staging: Staging, block: int, codes: Sequence[np.ndarray], codebook_size: int) -> list[str]:
    """Write the files of a block, and return their names.

    Args:
        codes: an array (codebooks, frames) for each segment, with zero frames if the segment has no codes.
    """
    arrays = {"": np.concatenate([array.ravel() for array in codes])}
    sizes = [array.nbytes for array in codes]
    places = arrays[".places"] = np.empty(len(codes), CODES)
    places["stop"] = _HEADER_BYTES + np.cumsum(sizes)
    places["start"] = places["stop"] - sizes
    places["xxh3"] = [xxhash.xxh3_64_intdigest(array.tobytes()) for array in codes]
    if len(codes[0]) * codebook_size <= _MAX_COUNTS:
        books = (np.concatenate(rows) for rows in zip(*codes, strict=True))
        arrays[".counts"] = np.stack([np.bincount(book, minlength=codebook_size) for book in books])
    for content, array in arrays.items():
        save_array(staging.path(_block_file(block, content)), array)
    return [_block_file(block, content) for content in arrays]


def merge_blocks(paths: StageDir, num_blocks: int, num_segments: int) -> dict[str, Path]:
    """Merge the ``CODES`` records of all blocks, and sum the code frequencies if they were counted.

    Returns:
        the paths of the merged files: ``places`` and, if codes were counted, ``counts``.

    Raises:
        ConfigError: a file is damaged.
    """
    merged = {"places": paths.merged / "places.npy"}
    files = [paths.path / _block_file(block, ".places") for block in range(num_blocks)]
    publish_array(merged["places"], CODES, (num_segments,), map(load_stored_array, files))
    files = [paths.path / _block_file(block, ".counts") for block in range(num_blocks)]
    if files and files[0].exists():
        merged["counts"] = paths.merged / "counts.npy"
        counts = sum(map(load_stored_array, files[1:]), load_stored_array(files[0]))
        publish_array(merged["counts"], counts.dtype, counts.shape, [counts])
    return merged


def read_counts(run: StageRun) -> np.ndarray | None:
    """Return the frequency of each code in all segments, shape (codebooks, codebook size).

    The result is None if the stage ``encode`` of the codec is not finished or did not count codes.

    Raises:
        ConfigError: the array is damaged.
    """
    totals = run.dir.read_totals()
    if totals is None or "counts" not in totals.products:
        return None
    path = run.product(f"{run.key}/counts")
    counts, codec = load_stored_array(path), run.totals_of(run.key, codec=CodecRecord).facts["codec"]
    if counts.dtype.kind != "i" or counts.shape != (codec.num_codebooks, codec.codebook_size):
        raise damaged_file(path, "it does not contain code frequencies")
    return counts


class SegmentCodes:
    """Codes of all segments, read on demand by segment number.

    Files stay open for later reads. If there are more files than the limit on open files permits, some are closed and
    reopened later.

    Args:
        paths: the folder of the stage that encoded the segments.
        places: the merged file of ``CODES`` records.
        codec: the codec that produced the codes.
    """

    def __init__(self, paths: StageDir, places: Path, codec: CodecRecord) -> None:
        self._folder = paths.path
        self._bounds = load_stored_array(paths.plan / BOUNDS_FILE)
        self._places = map_stored_array(places)
        self._num_codebooks = codec.num_codebooks
        self._dtype = codes_dtype(codec.codebook_size).newbyteorder("<")
        self._most_open = min(_MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._open: dict[int, BinaryIO] = {}

    def read(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the number and the codes (codebooks, frames) of each segment.

        Args:
            numbers: sorted segment numbers, so that files are read sequentially.

        Raises:
            UnitFailed: a file is damaged.
        """
        blocks = np.searchsorted(self._bounds, numbers, side="right") - 1
        places = self._places[numbers]
        for number, block, place in zip(numbers.tolist(), blocks.tolist(), places.tolist(), strict=True):
            data = self._read_bytes(block, *place)
            yield number, np.frombuffer(data, self._dtype).reshape(self._num_codebooks, -1)

    def close(self) -> None:
        """Close all open files."""
        for stream in self._open.values():
            stream.close()

    def _read_bytes(self, block: int, start: int, stop: int, checksum: int) -> bytes:
        if block not in self._open:
            if len(self._open) >= self._most_open:
                # Close the file that was opened last, since the next pass over the segments starts with the first
                # files.
                self._open.popitem()[1].close()
            self._open[block] = open_stored(self._folder / _block_file(block), buffering=0)
        file = self._open[block].fileno()
        is_inside = 0 <= start <= stop <= os.fstat(file).st_size
        data = os.pread(file, stop - start, start) if is_inside else b""
        # A damaged ``CODES`` record could point to the codes of another segment; the checksum detects this.
        if xxhash.xxh3_64_intdigest(data) != checksum:
            path = self._folder / _block_file(block)
            raise UnitFailed(f"{path} is damaged: delete it and run the stage encode again", code="damaged_run_dir")
        return data
