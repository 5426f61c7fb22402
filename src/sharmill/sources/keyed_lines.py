"""Lines of files found again by their keys, with 16 bytes of memory for each line; nothing else is held of plain files.

A file in gzip has no random access: its lines are held compressed, in blocks.
"""

from __future__ import annotations

import bisect
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import xxhash

from sharmill.sources.files import open_input
from sharmill.sources.json_lines import MAX_LINE_BYTES, is_gzip, iterate_checked

_BLOCK_BYTES: Final = 1 << 16


class KeyedLines:
    """An index over the lines of files, made when a key is first asked for. A copy in another process makes its own.

    Args:
        files: plain or in gzip.
        kind: the key of the source that names them.
        key_of: returns the key of a line, or None for a line that has none and cannot be found.
    """

    def __init__(self, files: Sequence[Path], kind: str, key_of: Callable[[bytes], bytes | None]) -> None:
        self._files = files
        self._kind = kind
        self._key_of = key_of

    def find(self, key: bytes) -> list[bytes]:
        """Return the lines that have a key, in their order."""
        hashes, positions = self._index
        begin, end = (np.searchsorted(hashes, np.uint64(xxhash.xxh3_64_intdigest(key)), s) for s in ("left", "right"))
        places = (divmod(int(position), 1 << 48) for position in positions[begin:end])
        lines = (self._stores[file].line(position) for file, position in places)
        return [line for line in lines if self._key_of(line) == key]

    @cached_property
    def _stores(self) -> list[_Plain | _Packed]:
        return [(_Packed if is_gzip(file) else _Plain)(file) for file in self._files]

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """The hashes of the keys, sorted, and the position of the line of each: the file above 2**48."""
        hashes, positions = array("Q"), array("Q")
        for number, (file, store) in enumerate(zip(self._files, self._stores, strict=True)):
            for position, line in store.begin(iterate_checked(file, self._kind)):
                key = self._key_of(line)
                if key is not None:
                    hashes.append(xxhash.xxh3_64_intdigest(key))
                    positions.append(number << 48 | position)
        found = np.frombuffer(hashes, np.uint64) if hashes else np.empty(0, np.uint64)
        order = np.argsort(found, kind="stable")
        return found[order], (np.frombuffer(positions, np.uint64) if positions else np.empty(0, np.uint64))[order]

    def __reduce__(self) -> tuple[type[KeyedLines], tuple[Sequence[Path], str, Callable[[bytes], bytes | None]]]:
        return KeyedLines, (self._files, self._kind, self._key_of)


class _Plain:
    """The lines of a plain file, read where they are."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _stream(self) -> BinaryIO:
        return open_input(self._path, "file")

    def begin(self, lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield (position, line)."""
        begin = 0
        for end, line in lines:
            yield begin, line
            begin = end

    def line(self, position: int) -> bytes:
        """Return the first line from a position on that is not blank."""
        self._stream.seek(position)
        # Its lines were read before, and were no longer then.
        while (line := self._stream.readline(MAX_LINE_BYTES)) and not line.strip():
            pass
        return line.strip()


class _Packed:
    """The lines of a file in gzip, compressed in blocks of some lines."""

    def __init__(self, path: Path) -> None:
        self._blocks: list[bytes] = []
        self._starts = array("Q")
        self._last: tuple[int, bytes] = (-1, b"")

    def begin(self, lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield (position, line), and keep the lines."""
        start, pending = 0, bytearray()
        for _, line in lines:
            yield start + len(pending), line
            pending += line + b"\n"
            if len(pending) >= _BLOCK_BYTES:
                self._add(start, pending)
                start, pending = start + len(pending), bytearray()
        self._add(start, pending)

    def _add(self, start: int, lines: bytearray) -> None:
        self._starts.append(start)
        self._blocks.append(zlib.compress(lines, 1))

    def line(self, position: int) -> bytes:
        """Return the line at a position."""
        number = bisect.bisect_right(self._starts, position) - 1
        if self._last[0] != number:
            self._last = (number, zlib.decompress(self._blocks[number]))
        begin = position - self._starts[number]
        return self._last[1][begin : self._last[1].index(b"\n", begin)]
