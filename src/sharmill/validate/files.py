"""One look at a file of a shard: its size, its checksum and what is in it.

Archives as sharmill and lhotse write them are walked by their headers, whose checksums are verified all at once. What
is not of that form is left to the strict reader, which either knows it (long names, PAX) or says what is wrong.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from sharmill.errors import DamagedShard
from sharmill.shar.fields import Item, read_cuts, read_field

_BLOCK: Final = 512
_ZEROS: Final = bytes(_BLOCK)
_SIZE, _CHECKSUM, _KIND, _MAGIC = slice(124, 136), slice(148, 156), slice(156, 157), slice(257, 263)
# Large enough for few calls, small enough for the cache.
_READ_BYTES: Final = 1 << 20
_NO_DATA: Final = "nodata"

_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Looked:
    """What there is in a file. ``contents`` are cuts, as mappings, or items; None where ``damage`` says why not."""

    size: int
    xxh3: str
    contents: list[Any] | None
    damage: str | None


class Memory:
    """Memory that files are read into, one after the other: fresh memory for each would cost more than the reading."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, dtype=np.uint8)

    def read(self, path: Path) -> tuple[memoryview, str]:
        """The bytes of a file, which stay until the next call, and their checksum."""
        size = path.stat().st_size
        if len(self._buffer) < size:
            self._buffer = np.empty(size + size // 4, dtype=np.uint8)
        view, digest, position = self._buffer.data, xxhash.xxh3_64(), 0
        with path.open("rb", buffering=0) as stream:
            # In blocks that are still in the processor's cache when they are hashed.
            while length := stream.readinto(view[position : min(position + _READ_BYTES, size)]):
                digest.update(view[position : position + length])
                position += length
        return view[:position], digest.hexdigest()


def look_at_cuts(path: Path, memory: Memory) -> Looked:
    """A file of cuts."""
    view, xxh3 = memory.read(path)
    try:
        contents = _decode_lines(path, view)
        return Looked(len(view), xxh3, list(read_cuts(path)) if contents is None else contents, None)
    except DamagedShard as error:
        return Looked(len(view), xxh3, None, str(error))


def _decode_lines(path: Path, view: memoryview) -> list[Any] | None:
    """All cuts at one go, or None where that does not work; why not, is for the reader of single lines to say."""
    compressed = path.suffix == ".gz"
    if compressed and not view:
        return None  # gzip takes no bytes at all for an empty file
    try:
        data = gzip.decompress(view) if compressed else bytes(view)
        cuts = _decoder.decode_lines(data)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # Blank lines are passed over here, and are damage to a reader.
    return cuts if len(cuts) == data.count(b"\n") else None


def look_at_field(path: Path, memory: Memory) -> Looked:
    """A tar file. The data of its items are views of ``memory``, which must not be used for another file meanwhile."""
    view, xxh3 = memory.read(path)
    items = _walk(view)
    if items is not None:
        return Looked(len(view), xxh3, items, None)
    try:
        return Looked(len(view), xxh3, list(read_field(path)), None)
    except DamagedShard as error:
        return Looked(len(view), xxh3, None, str(error))


def _walk(view: memoryview) -> list[Item] | None:
    """The items of an archive of plain members, or None where it is anything else, which may be damage."""
    headers: list[bytes] = []
    names: list[str] = []
    spans: list[Any] = []  # views, which serve as bytes
    position, end = 0, len(view)
    try:
        while (header := bytes(view[position : position + _BLOCK])) != _ZEROS:
            # tarfile writes eleven octal digits and a NUL; int() alone would take signs and blanks too.
            digits = header[_SIZE]
            if header[_KIND] != b"0" or digits[11] != 0 or not digits[:11].isdigit():
                return None
            if header[_MAGIC] == b"ustar\0" and header[345]:
                return None
            start = position + _BLOCK
            stop = start + int(digits[:11], 8)
            position = stop + -stop % _BLOCK
            if position > end or bytes(view[stop:position]).strip(b"\0"):
                return None
            headers.append(header)
            names.append(header[:100].rstrip(b"\0").decode("utf-8", "surrogateescape"))
            spans.append(view[start:stop])
        if end - position < 2 * _BLOCK or bytes(view[position:]).strip(b"\0") or not _are_intact(headers):
            return None
        return _pair(names, spans)
    except (ValueError, IndexError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _are_intact(headers: Sequence[bytes]) -> bool:
    """Whether the checksum of every header, which counts itself as blanks, is right."""
    if not headers:
        return True
    blocks = np.frombuffer(b"".join(headers), dtype=np.uint8).reshape(-1, _BLOCK)
    sums = blocks.sum(axis=1, dtype=np.int64) - blocks[:, _CHECKSUM].sum(axis=1, dtype=np.int64) + 8 * ord(" ")
    # Six octal digits, a NUL and a blank; any other form is for the strict reader.
    digits = blocks[:, 148:154].astype(np.int64) - ord("0")
    if digits.min() < 0 or digits.max() > 7 or (blocks[:, 154:156] != (0, ord(" "))).any():
        return False
    return bool((digits @ (8 ** np.arange(5, -1, -1)) == sums).all())


def _pair(names: list[str], spans: list[Any]) -> list[Item] | None:
    if len(names) % 2:
        return None
    items: list[Item] = []
    for number in range(0, len(names), 2):
        cut_id, _, extension = names[number].rpartition(".")
        if extension == _NO_DATA or names[number + 1] != f"{cut_id}.json":
            return None
        items.append(Item(cut_id, extension, spans[number], _decoder.decode(spans[number + 1])))
    return items
