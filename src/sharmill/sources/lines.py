"""Lines of files, plain or in gzip: the check that JSON is on them, pieces of them, and lines found by their keys."""

from __future__ import annotations

import bisect
import codecs
import gzip
import io
import itertools
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

import msgspec
import numpy as np
import xxhash

from sharmill.sources import Piece
from sharmill.sources.files import bad_file, open_input, read_ends

Found = TypeVar("Found")

# A file with a longer line is none of lines, and would be read into memory as a whole.
_MAX_LINE_BYTES: Final = 64 << 20
_GZIP: Final = b"\x1f\x8b"
# Bytes of the lines of a file in gzip that are held as one.
_BLOCK_BYTES: Final = 1 << 16
_DAMAGED: Final = (EOFError, zlib.error, gzip.BadGzipFile)
_BOMS: Final = {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    codecs.BOM_UTF8: "UTF-8 with a byte order mark",
}


def is_gzip(path: Path) -> bool:
    """Return True if a file is in gzip, whatever its name."""
    with open_input(path, "file") as stream:
        return stream.read(2) == _GZIP


def open_lines(path: Path, kind: str = "file") -> BinaryIO:
    """Open a file, plain or in gzip; positions are those of the unpacked bytes."""
    stream = open_input(path, kind)
    is_packed = stream.read(2) == _GZIP
    stream.seek(0)
    if not is_packed:
        return stream
    packed = gzip.GzipFile(fileobj=stream)
    packed.myfileobj = cast("Any", stream)  # closed with it
    # A buffer of its own: reading lines of a GzipFile is slow.
    return cast("BinaryIO", io.BufferedReader(cast("Any", packed), 1 << 20))


class LineReader:
    """Records of the lines of files, in pieces. Lines that are blank have none.

    The last file stays open: a later piece of it in gzip goes on from there, and only an earlier one begins such a file
    again.

    Args:
        files: plain or in gzip.
        kind: the key of the source that names them.
        count: returns the number of records of a line.
    """

    def __init__(self, files: Sequence[Path], kind: str, count: Callable[[bytes], int] | None = None) -> None:
        self._files = files
        self._kind = kind
        self._count = count
        self._open: tuple[Path, BinaryIO] | None = None

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of equally many records, each found by the place of a line and the records of it to leave out."""
        for number, file in enumerate(self._files):
            begin = skip = count = position = 0
            for end, line in iterate_checked(file, self._kind):
                in_line = 1 if self._count is None else self._count(line)
                count += in_line
                while count >= records_per_piece:
                    yield _piece(number, begin, skip, records_per_piece)
                    count -= records_per_piece
                    begin, skip = (position, in_line - count) if count else (end, 0)
                position = end
            if count:
                yield _piece(number, begin, skip, count)

    def read(self, piece: dict[str, Any], records_of: Callable[[bytes], Iterable[Found]]) -> Iterator[Found]:
        """Yield the records of a piece, of which ``records_of`` makes those of a line."""
        records = itertools.chain.from_iterable(
            map(records_of, self._lines(self._files[piece["file"]], piece["begin"]))
        )
        return itertools.islice(records, piece["skip"], piece["skip"] + piece["count"])

    def _lines(self, path: Path, begin: int) -> Iterator[bytes]:
        if self._open is None or self._open[0] != path:
            if self._open is not None:
                self._open[1].close()
            self._open = path, open_lines(path, self._kind)
        stream = self._open[1]
        stream.seek(begin)
        for _, line in _iterate(stream, path, begin, self._kind):
            yield line


def _piece(file: int, begin: int, skip: int, count: int) -> Piece:
    # By its number: the files may have been moved, with their project, when the piece is read.
    return Piece(count, {"file": file, "begin": begin, "skip": skip, "count": count})


def iterate_checked(path: Path, kind: str) -> Iterator[tuple[int, bytes]]:
    """Yield (end, line) of all lines that are not blank; ``kind`` is the key of the source that names the file.

    Raises:
        ConfigError: the file is damaged or cut off, or has a line of more than 64 MiB.
    """
    try:
        with open_lines(path, kind) as stream:
            yield from _iterate(stream, path, 0, kind)
    except _DAMAGED as error:
        raise bad_file(path, kind, f"is damaged or cut off ({error}); copy it again") from error


def _iterate(stream: BinaryIO, path: Path, position: int, kind: str) -> Iterator[tuple[int, bytes]]:
    while line := stream.readline(_MAX_LINE_BYTES + 1):
        if len(line) > _MAX_LINE_BYTES:
            raise bad_file(path, kind, "has a line of more than 64 MiB; write each record on a line of its own")
        position += len(line)
        if stripped := line.strip():
            yield position, stripped


def check_json_lines(
    path: Path,
    kind: str,
    remedy: str,
    check: Callable[[dict[str, Any]], str | None] = lambda first: None,
    *,
    compressed: Collection[str] = (),
) -> None:
    """Prove that a file can be read as JSON lines at all.

    Args:
        path: the file.
        kind: the key of the source that names it.
        remedy: the end of the sentence where it has no records on lines of their own.
        check: returns what is wrong with the first object, or None.
        compressed: ("gzip",) where it may be in gzip.

    Raises:
        ConfigError: it is missing, empty, binary, compressed otherwise, in another encoding, one JSON array, no JSON
            or other records, or cut off in its last line.
    """
    head, tail = read_ends(path, kind, compressed)
    packed = is_gzip(path)
    if packed:
        try:
            with open_lines(path) as stream:
                head = stream.read(1 << 16)
        except _DAMAGED as error:
            raise bad_file(path, kind, f"is damaged or cut off ({error}); copy it again") from error
    if (problem := _problem(head, remedy)) is not None:
        raise bad_file(path, kind, problem)
    objects = (found for line in head.splitlines() if isinstance(found := _parse(line), dict))
    if (first := next(objects, None)) is not None and (wrong := check(first)) is not None:
        raise bad_file(path, kind, wrong)
    if not packed and not tail.endswith(b"\n") and _parse(tail.rsplit(b"\n", 1)[-1]) is ...:
        raise bad_file(
            path,
            kind,
            "seems to be cut off: its last line is not complete JSON; copy it again, or remove that line",
        )


def _parse(line: bytes) -> Any:
    """Return the JSON value of a line; an ellipsis where it is none."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ...


def _problem(head: bytes, remedy: str) -> str | None:
    """Return what is wrong with a file that begins with ``head``; None where it may be JSON lines in UTF-8."""
    for mark, encoding in _BOMS.items():
        if head.startswith(mark):
            return f"is {encoding}; save it as plain UTF-8"
    if b"\0" in head:
        return "is binary or UTF-16, not lines of JSON in UTF-8"
    lines = [line.strip() for line in head.splitlines() if line.strip()]
    if not lines:
        return "is empty"
    if lines[0].startswith(b"["):
        return f"is one JSON array; {remedy}"
    if lines[0] == b"{":
        return f"is JSON of which a record takes several lines; {remedy}"
    # A bad line is a reject; where no line at all begins like a record, the file is of another kind.
    if any(line.startswith(b"{") for line in lines):
        return None
    marks = (b",", b"\t", b";", b"|")
    looks_like = "a table (CSV or TSV)" if any(mark in lines[0] for mark in marks) else "plain text"
    return f"is {looks_like}, not lines of JSON; {remedy}"


class KeyedLines:
    """An index over the lines of files, made when a key is first asked for.

    It takes 16 bytes of memory for each line. Of plain files nothing else is held; a file in gzip has no random access,
    and its lines are held compressed, in blocks.

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
        while (line := self._stream.readline(_MAX_LINE_BYTES)) and not line.strip():
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
