"""Reading of single items through the index files beside shards, which ``sharmill.shar.sidecars`` writes."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from sharmill.errors import DamagedShard
from sharmill.files.location import Location
from sharmill.shar.json_lines import read_json_lines
from sharmill.shar.tar import load, open_field

_OFFSET: Final = np.dtype("<u8")
# The maximum size of an index file, which is enough for eight million items.
_MAX_INDEX_BYTES: Final = 64 << 20


def read_offsets(index: Location, path: Location, size: int) -> np.ndarray:
    """Read the offsets of a file's items, followed by the file's size in bytes, from its index file.

    Args:
        index: the index file.
        path: the indexed file, for messages.
        size: the actual size of the indexed file in bytes.

    Raises:
        DamagedShard: the index is missing, damaged, or belongs to another file.
    """
    with open_field(index) as stream:
        content = stream.read(_MAX_INDEX_BYTES + 1)
    if len(content) > _MAX_INDEX_BYTES:
        raise DamagedShard(f"{index} has more than {_MAX_INDEX_BYTES >> 20} MiB: it is not the index of a shard")
    offsets = np.frombuffer(content[: len(content) // _OFFSET.itemsize * _OFFSET.itemsize], _OFFSET)
    if not len(offsets) or int(offsets[-1]) != size or np.any(offsets[1:] < offsets[:-1]):
        raise DamagedShard(f"{index} is not the index of {path}: write it again with sharmill sidecars")
    return offsets


class IndexedLines:
    """The lines of an uncompressed file, each read only when requested.

    The file stays open as long as this object is referenced.

    Raises:
        DamagedShard: on construction, if the file or its index is missing, or the index belongs to another file.
    """

    def __init__(self, path: Location, index: Location) -> None:
        self._content = load(path, in_parts=True)
        self._offsets = read_offsets(index, path, len(self._content))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> bytes:
        begin, end = self._offsets[number : number + 2].tolist()
        return self._content[begin:end]


def open_indexed_lines(path: Location, sidecars: Sequence[Location]) -> IndexedLines | list[bytes]:
    """Return the lines of a file; with ``sidecars``, each line is read on request from the file's uncompressed copy."""
    if not sidecars:
        return read_json_lines(path)
    *plain, index = sidecars
    return IndexedLines(plain[0] if plain else path, index)
