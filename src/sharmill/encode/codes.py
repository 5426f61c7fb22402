"""The codes of segments in the run directory, which a stage ``encode`` leaves for the assembly of shards.

A block of segments has three ``.npy`` files: the codes of its segments, one behind the other and each codebook by
codebook; a record of ``CODES`` for each segment, by which its codes are read and checked alone; and how often each code
occurs in each codebook. At its end the stage merges the records of all blocks into one array, and adds up the counts.
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

# The bounds of the blocks, in the folder of the plan.
BOUNDS_FILE: Final = "bounds.npy"
# The bytes of a segment's codes in the file of its block, and their checksum.
CODES: Final = np.dtype([("start", "<i8"), ("stop", "<i8"), ("xxh3", "<u8")])
# Bytes that numpy writes before the content of an array of one dimension.
_HEADER_BYTES: Final = 128
# Codebooks times their size: codecs with more codes are not counted.
_MAX_COUNTS: Final = 1 << 21
# Files of codes that a rank keeps open at most, if its limit allows: those of 32,768 hours in blocks of two.
_MOST_OPEN: Final = 1 << 14


def _block_file(block: int, content: str = "") -> str:
    """Return the path of a file of a block relative to the folder of the stage: of its codes, places or counts."""
    return f"parts/{block:06d}{content}.npy"


def write_block(staging: Staging, block: int, codes: Sequence[np.ndarray], codebook_size: int) -> list[str]:
    """Write the files of a block, and return their names.

    Args:
        codes: for each segment an array (codebooks, frames), without frames if it has no codes.
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
    """Merge the places of all blocks, and add up their counts if the codes were counted; return the files by content.

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
    """Return how often each code occurs in all segments (codebooks, codebook size).

    None if the stage ``encode`` of a codec is not finished, or did not count.

    Raises:
        ConfigError: the array is damaged.
    """
    totals = run.dir.read_totals()
    if totals is None or "counts" not in totals.products:
        return None
    path = run.product(f"{run.key}/counts")
    counts, codec = load_stored_array(path), run.totals_of(run.key, codec=CodecRecord).facts["codec"]
    if counts.dtype.kind != "i" or counts.shape != (codec.num_codebooks, codec.codebook_size):
        raise damaged_file(path, "it has no counts of the codes")
    return counts


class SegmentCodes:
    """The codes of all segments, by their numbers.

    Only the codes of the segments that are asked for are read. Files stay open, so that they are opened once however
    often segments are asked for; beyond a number that the limit of open files allows, they take turns.

    Args:
        paths: the folder of the stage that made them.
        places: the file of their places, which the stage has merged.
        codec: the codec that made them.
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
        """Yield segments and their codes (codebooks, frames); ``numbers`` are sorted, and each file is read forward.

        Raises:
            UnitFailed: a file is damaged.
        """
        blocks = np.searchsorted(self._bounds, numbers, side="right") - 1
        places = self._places[numbers]
        for number, block, place in zip(numbers.tolist(), blocks.tolist(), places.tolist(), strict=True):
            data = self._read_bytes(block, *place)
            yield number, np.frombuffer(data, self._dtype).reshape(self._num_codebooks, -1)

    def close(self) -> None:
        """Close the files that are open."""
        for stream in self._open.values():
            stream.close()

    def _read_bytes(self, block: int, start: int, stop: int, checksum: int) -> bytes:
        if block not in self._open:
            if len(self._open) >= self._most_open:
                # The first ones are asked for first again.
                self._open.popitem()[1].close()
            self._open[block] = open_stored(self._folder / _block_file(block), buffering=0)
        file = self._open[block].fileno()
        is_inside = 0 <= start <= stop <= os.fstat(file).st_size
        data = os.pread(file, stop - start, start) if is_inside else b""
        # In a place that is damaged are other codes.
        if xxhash.xxh3_64_intdigest(data) != checksum:
            path = self._folder / _block_file(block)
            raise UnitFailed(
                f"{path} is damaged: remove it and run the stage encode, which makes it again", code="damaged_run_dir"
            )
        return data
