"""Files of a shard from which any cut is read by itself, by the index files that ``sharmill.shar.sidecars`` writes.

Opening one reads nothing but the index, where ``TarTable`` goes through all headers and cuts are unpacked as a whole.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from sharmill.errors import DamagedShard
from sharmill.shar.items import ItemTable, pair_names
from sharmill.shar.tar import open_field, parse_members

_OFFSET = np.dtype("<u8")
# Eight million items.
_MAX_INDEX_BYTES = 64 << 20


class IndexedFile:
    """A file that is a sequence of items, the lines of an uncompressed file of cuts too, and where each begins.

    Raises:
        DamagedShard: one of the two is not there, or the index is of another file.
    """

    def __init__(self, path: Path, index: Path) -> None:
        with open_field(index) as stream:
            content = stream.read(_MAX_INDEX_BYTES + 1)
        if len(content) > _MAX_INDEX_BYTES:
            raise DamagedShard(f"{index} has more than {_MAX_INDEX_BYTES >> 20} MiB: it is not the index of a shard")
        with open_field(path) as stream:
            size = stream.seek(0, 2)
            offsets = np.frombuffer(content[: len(content) // _OFFSET.itemsize * _OFFSET.itemsize], _OFFSET)
            if not len(offsets) or int(offsets[-1]) != size or np.any(offsets[1:] < offsets[:-1]):
                raise DamagedShard(f"{index} is not the index of {path}: write it anew with sharmill sidecars")
            self.data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> bytes:
        begin, end = self.span(number)
        return self.data[begin:end]

    def span(self, number: int) -> tuple[int, int]:
        """Return where an item begins and ends."""
        return int(self._offsets[number]), int(self._offsets[number + 1])

    def close(self) -> None:
        if isinstance(self.data, mmap.mmap):
            self.data.close()


class IndexedItems(ItemTable):
    """The items of a tar field, of which only those that are asked for are looked at."""

    def __init__(self, path: Path, index: Path) -> None:
        self._path = path
        self._file = IndexedFile(path, index)
        self.close = self._file.close
        self._number = -1

    def __len__(self) -> int:
        return len(self._file)

    def pair(self, number: int) -> tuple[str, str]:
        self._look_at(number)
        return pair_names(self._path, [name for name, _, _ in self._members])

    def place(self, number: int) -> tuple[int, int]:
        self._look_at(number)
        return self._members[0][1:]

    def data(self, number: int) -> bytes:
        return self._read(number, 0)

    def metadata(self, number: int) -> bytes:
        return self._read(number, 1)

    def _read(self, number: int, member: int) -> bytes:
        self._look_at(number)
        _, start, size = self._members[member]
        return self._file.data[start : start + size]

    def _look_at(self, number: int) -> None:
        """Parse the headers of an item; those of the last one that was asked for are kept."""
        if number == self._number:
            return
        begin, end = self._file.span(number)
        is_last = number == len(self) - 1
        self._members = parse_members(self._path, self._file.data, begin, None if is_last else end)
        self._number = number
