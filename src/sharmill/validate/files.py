"""One look at a file of a shard: its size, its checksum and what is in it.

Archives as sharmill and lhotse write them are walked by their headers, whose checksums are verified all at once. What
is not of that form is left to the strict reader, which either knows it (long names, PAX) or says what is wrong.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from sharmill.errors import DamagedShard
from sharmill.shar.cut_lines import decompress, read_cuts
from sharmill.shar.items import NO_DATA, Item, read_field

_BLOCK: Final = 512
_CHECKSUM: Final = slice(148, 156)
# Large enough for few calls, small enough for the cache.
_READ_BYTES: Final = 1 << 20

_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Looked:
    """What there is in a file. ``contents`` are cuts, as mappings, or items; None where ``damage`` says why not."""

    size: int
    xxh3: str
    contents: list[Any] | None
    damage: str | None


class FileReader:
    """Looks at files, one after the other, through the same memory: fresh memory would cost more than the reading."""

    def __init__(self) -> None:
        self._block = bytearray(_READ_BYTES)

    def look_at_cuts(self, path: Path) -> Looked:
        """A file of cuts."""
        data = path.read_bytes()
        xxh3 = xxhash.xxh3_64_hexdigest(data)
        try:
            contents = _decode_lines(path, data)
            return Looked(len(data), xxh3, list(read_cuts(path)) if contents is None else contents, None)
        except DamagedShard as error:
            return Looked(len(data), xxh3, None, str(error))

    def look_at_field(self, path: Path) -> Looked:
        """A tar file. The data of its items are views of the file, which is mapped into memory."""
        with path.open("rb", buffering=0) as stream:
            size, xxh3 = self._hash(stream)
            # Hashed before in blocks that stay in the processor's cache; of the map, few pages are touched.
            mapped = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        items = _walk(mapped)
        if items is not None:
            return Looked(size, xxh3, items, None)
        try:
            return Looked(size, xxh3, list(read_field(path)), None)
        except DamagedShard as error:
            return Looked(size, xxh3, None, str(error))

    def _hash(self, stream: FileIO) -> tuple[int, str]:
        """The size and the checksum of a file."""
        view, digest, size = memoryview(self._block), xxhash.xxh3_64(), 0
        while length := stream.readinto(self._block):
            digest.update(view[:length])
            size += length
        return size, digest.hexdigest()


def _decode_lines(path: Path, data: bytes) -> list[Any] | None:
    """All cuts at one go, or None where that does not work; why not, is for the reader of single lines to say."""
    compressed = path.suffix == ".gz"
    if compressed and not data:
        return None  # gzip takes no bytes at all for an empty file
    try:
        data = decompress(path, data) if compressed else data
        cuts = _decoder.decode_lines(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # Blank lines are passed over here, and are damage to a reader.
    return cuts if len(cuts) == data.count(b"\n") else None


def _walk(data: mmap.mmap | bytes) -> list[Item] | None:
    """The items of an archive of plain members, or None where it is anything else, which may be damage.

    Step by step goes only what must: from each header to the next. What is in the headers is looked at all together.
    """
    positions: list[int] = []
    sizes: list[int] = []
    position, end = 0, len(data)
    try:
        while digits := data[position + 124 : position + 135].strip(b"\0"):
            if not digits.isdigit():
                return None  # a size below zero would lead back
            size = int(digits, 8)
            positions.append(position)
            sizes.append(size)
            position += _BLOCK + size + -size % _BLOCK
        if end % _BLOCK or end - position < 2 * _BLOCK or data[position:].strip(b"\0"):
            return None
        names = _read_headers(np.frombuffer(data, dtype=np.uint8).reshape(-1, _BLOCK), positions, sizes)
        if names is None:
            return None
        view = memoryview(data)
        # Views, which serve as bytes.
        spans: list[Any] = [view[p + _BLOCK : p + _BLOCK + n] for p, n in zip(positions, sizes, strict=True)]
        return _pair(names, spans)
    except (ValueError, IndexError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _read_headers(blocks: np.ndarray, positions: list[int], sizes: list[int]) -> list[str] | None:
    """The names of members, or None unless all are plain files with intact headers and empty padding.

    ``blocks`` (blocks, 512) are the whole archive; members begin at byte ``positions`` and have ``sizes`` bytes.
    """
    if not positions:
        return []
    first, length = np.array(positions) // _BLOCK, np.array(sizes)
    headers = blocks[first]
    # As tarfile writes them: eleven octal digits and a NUL; int() alone would take signs and blanks too.
    digits = headers[:, 124:135]
    if (
        ((digits < ord("0")) | (digits > ord("7"))).any()
        or headers[:, 135].any()
        or (headers[:, 156] != ord("0")).any()
    ):
        return None
    # A path may be divided in two in headers of POSIX, whose magic ends in a NUL.
    if ((headers[:, 262] == 0) & (headers[:, 345] != 0)).any() or not _are_intact(headers):
        return None
    # Behind the last byte of a member, to the end of its block, there is nothing.
    used = (length % _BLOCK).astype(np.uint16)
    tails = blocks[first + (length - 1) // _BLOCK + 1]
    if (tails * ((np.arange(_BLOCK, dtype=np.uint16) >= used[:, None]) & (used[:, None] > 0))).any():
        return None
    names = np.ascontiguousarray(headers[:, :100]).view("S100")[:, 0].tolist()
    return [name.decode("utf-8", "surrogateescape") for name in names]


def _are_intact(headers: np.ndarray) -> bool:
    """Whether the checksum of every header (headers, 512), which counts itself as blanks, is right."""
    sums = headers.sum(axis=1, dtype=np.int64) - headers[:, _CHECKSUM].sum(axis=1, dtype=np.int64) + 8 * ord(" ")
    # Six octal digits, a NUL and a blank; any other form is for the strict reader.
    digits = headers[:, 148:154].astype(np.int64) - ord("0")
    if digits.min() < 0 or digits.max() > 7 or (headers[:, 154:156] != (0, ord(" "))).any():
        return False
    return bool((digits @ (8 ** np.arange(5, -1, -1)) == sums).all())


def _pair(names: list[str], spans: list[Any]) -> list[Item] | None:
    if len(names) % 2:
        return None
    items: list[Item] = []
    for name, other, data, metadata in zip(names[::2], names[1::2], spans[::2], spans[1::2], strict=True):
        cut_id, _, extension = name.rpartition(".")
        if extension == NO_DATA or other != f"{cut_id}.json":
            return None
        items.append(Item(cut_id, extension, data, _decoder.decode(metadata)))
    return items
