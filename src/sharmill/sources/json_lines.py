"""JSON lines, plain or in gzip: the check that a file has them, its pieces, and the lines of a piece."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import msgspec

from sharmill.sources.files import bad_file, open_input, read_ends

# A file with a longer line is none of JSON lines, and would be read into memory as a whole.
MAX_LINE_BYTES: Final = 64 << 20
_GZIP: Final = b"\x1f\x8b"
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


def open_lines(path: Path) -> BinaryIO:
    """Open a file, plain or in gzip; positions are those of the unpacked bytes."""
    stream = open_input(path, "file")
    is_packed = stream.read(2) == _GZIP
    stream.seek(0)
    if not is_packed:
        return stream
    packed = gzip.GzipFile(fileobj=stream)
    packed.myfileobj = cast("Any", stream)  # closed with it
    # A buffer of its own: reading lines of a GzipFile is slow.
    return cast("BinaryIO", io.BufferedReader(cast("Any", packed), 1 << 20))


class LineReader:
    """Lines of files from a position on. The last file stays open: a later piece of it in gzip goes on from there.

    Only an earlier piece begins such a file again. Copies in other processes open their own.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._stream: BinaryIO = io.BytesIO()

    def lines(self, path: Path, begin: int) -> Iterator[bytes]:
        """Yield the lines from a position on that are not blank; one iteration at a time."""
        if path != self._path:
            self._stream.close()
            self._stream, self._path = open_lines(path), path
        self._stream.seek(begin)
        for _, line in _iterate(self._stream, path, begin):
            yield line

    def __reduce__(self) -> tuple[type[LineReader], tuple[()]]:
        return LineReader, ()


def iterate_checked(path: Path, kind: str) -> Iterator[tuple[int, bytes]]:
    """Yield (end, line) of all lines that are not blank; ``kind`` is the key of the source that names the file.

    Raises:
        ConfigError: the file is damaged or cut off, or has a line of more than 64 MiB.
    """
    try:
        with open_lines(path) as stream:
            yield from _iterate(stream, path, 0, kind)
    except _DAMAGED as error:
        raise bad_file(path, kind, f"is damaged or cut off ({error}); copy it again") from error


def _iterate(stream: BinaryIO, path: Path, position: int, kind: str = "file") -> Iterator[tuple[int, bytes]]:
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
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
    objects = (found for line in head.splitlines() if (found := _object(line)) is not None)
    if (first := next(objects, None)) is not None and (wrong := check(first)) is not None:
        raise bad_file(path, kind, wrong)
    if not packed and not tail.endswith(b"\n") and not _is_json(tail.rsplit(b"\n", 1)[-1]):
        raise bad_file(
            path,
            kind,
            "seems to be cut off: its last line is not complete JSON; copy it again, or remove that line",
        )


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


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
