"""The codes of segments in the run directory: a file for each block of segments, and reading of single segments.

A file is a table and the codes of each segment behind it, codebook by codebook. The table has the position of the codes
of each segment and their checksum, and at its end the size of the file and a checksum of the table itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from sharmill.engine.rundir import StageDir
from sharmill.engine.stored import decode_stored, load_stored_array, read_stored
from sharmill.errors import UnitFailed
from sharmill.shar.arrays import codes_dtype
from sharmill.shar.index import CodecRecord
from sharmill.storage import open_stored

_ENTRY: Final = np.dtype([("position", "<i8"), ("xxh3", "<u8")])


class EncodedRecord(msgspec.Struct, frozen=True):
    """The outcome of a stage ``encode``: codec, None where there are no segments, and checksum of all codes."""

    codec: CodecRecord | None
    codes: str


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


def write_codes(path: Path, codes: Sequence[np.ndarray]) -> None:
    """Write the codes (codebooks, frames) of the segments of a block, in their order."""
    table = np.empty(len(codes) + 1, _ENTRY)
    table["position"] = table.nbytes + np.concatenate([[0], np.cumsum([array.nbytes for array in codes])])
    table["xxh3"][:-1] = [xxhash.xxh3_64_intdigest(array.tobytes()) for array in codes]
    table["xxh3"][-1] = _hash_table(table)
    with path.open("wb") as stream:
        stream.write(table.tobytes())
        for array in codes:
            stream.write(array.tobytes())


def _hash_table(table: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(table[:-1].tobytes() + table["position"][-1].tobytes())


class SegmentCodes:
    """The codes of all segments, by their numbers.

    Args:
        paths: the folder of the stage that made them.
        codec: what the codes are of.
    """

    def __init__(self, paths: StageDir, codec: CodecRecord) -> None:
        self._folder = paths.path
        self._bounds = load_stored_array(bounds_file(paths.plan))
        self._num_codebooks = codec.num_codebooks
        self._dtype = codes_dtype(codec.codebook_size).newbyteorder("<")

    def read(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield segments and their codes (codebooks, frames); ``numbers`` are sorted, and each file is read forward.

        Raises:
            UnitFailed: a file is not there, or damaged.
        """
        blocks = np.searchsorted(self._bounds, numbers, side="right") - 1
        for block in np.unique(blocks).tolist():
            path = self._folder / codes_file(block)
            first, stop = self._bounds[block : block + 2].tolist()
            with open_stored(path) as stream:
                size = _ENTRY.itemsize * (stop - first + 1)
                table: Any = np.frombuffer(stream.read(size).ljust(size, b"\0"), _ENTRY)
                if table["xxh3"][-1] != _hash_table(table):
                    raise _damaged(path)
                for number in numbers[blocks == block].tolist():
                    (position, expected), (end, _) = table[number - first : number - first + 2].tolist()
                    stream.seek(position)
                    data = stream.read(end - position)
                    if xxhash.xxh3_64_intdigest(data) != expected:
                        raise _damaged(path)
                    yield number, np.frombuffer(data, self._dtype).reshape(self._num_codebooks, -1)


def _damaged(path: Path) -> UnitFailed:
    return UnitFailed(
        f"{path} is damaged: remove it and run the stage encode, which makes it again", code="damaged_run_dir"
    )
