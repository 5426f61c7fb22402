"""One pass over a file of a shard: its size, its checksum and its contents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from sharmill.errors import DamagedShard
from sharmill.shar.cut_lines import decode_cut, split_lines
from sharmill.shar.items import ItemTable

# Large enough for few calls, small enough for the processor's cache.
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadFile:
    """The content of a file. ``contents`` are cuts, as mappings, or items; None where ``damage`` says why not."""

    size: int
    xxh3: str
    contents: list[Any] | None
    damage: str | None


class FileReader:
    """Reader of one file after the other through the same memory: fresh memory would cost more than the reading."""

    def __init__(self) -> None:
        self._block = bytearray(_READ_BYTES)

    def read_cuts(self, path: Path) -> ReadFile:
        """Return the cuts of a file."""
        data = path.read_bytes()
        xxh3 = xxhash.xxh3_64_hexdigest(data)
        try:
            return ReadFile(len(data), xxh3, [decode_cut(path, line) for line in split_lines(path, data)], None)
        except DamagedShard as error:
            return ReadFile(len(data), xxh3, None, str(error))

    def read_field(self, path: Path) -> ReadFile:
        """Return the items of a tar file; their data are views of the file, which is mapped into memory."""
        # Hashed in blocks that stay in the processor's cache; of the map, few pages are touched afterwards.
        size, xxh3 = self._hash(path)
        try:
            table = ItemTable(path)
            return ReadFile(size, xxh3, [table.item(number, copy=False) for number in range(len(table))], None)
        except DamagedShard as error:
            return ReadFile(size, xxh3, None, str(error))

    def _hash(self, path: Path) -> tuple[int, str]:
        view, digest, size = memoryview(self._block), xxhash.xxh3_64(), 0
        with path.open("rb", buffering=0) as stream:
            while length := stream.readinto(self._block):
                digest.update(view[:length])
                size += length
        return size, digest.hexdigest()
