"""NeMo manifests: JSON lines, in one file or in numbered shards."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from sharmill.errors import ConfigError
from sharmill.manifest import iterate_lines
from sharmill.sources import Piece
from sharmill.sources.files import FileSource, bad_file, read_ends

# A file with a longer line is no manifest, and would be read into memory as a whole.
_MAX_LINE_BYTES = 64 << 20
_ONE_PER_LINE = (
    "write each record on a line of its own, as a JSON object with audio_filepath, duration, speaker and text"
)
_BOMS = {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    codecs.BOM_UTF8: "UTF-8 with a byte order mark",
}


@dataclass(frozen=True, kw_only=True)
class NemoSource(FileSource):
    """Records of NeMo manifests: JSON lines, one utterance a line."""

    files_key: ClassVar[str] = "manifest"
    type: str = "nemo"
    manifest: str | list[str]
    """Path of the manifest, or a list of them. A path may name shards, ``manifest__OP_0..63_CL_.json`` or
    ``manifest_{0..63}.json``, also with ``()``, ``[]`` or ``<>``, or have ``*`` and ``?``, which find files."""

    def check(self) -> None:
        """Raise ConfigError where a file cannot be a manifest."""
        for file in self.files:
            check_manifest(file)

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of lines, each found again by its byte range."""
        for number, file in enumerate(self.files):
            begin = end = count = 0
            with file.open("rb") as stream:
                while line := stream.readline(_MAX_LINE_BYTES + 1):
                    if len(line) > _MAX_LINE_BYTES:
                        raise _bad(file, f"has a line of more than 64 MiB; {_ONE_PER_LINE}")
                    end += len(line)
                    count += bool(line.strip())
                    if count == records_per_piece:
                        yield _piece(number, begin, end, count)
                        begin, count = end, 0
            if count:
                yield _piece(number, begin, end, count)

    def read(self, piece: dict[str, Any]) -> Iterator[bytes]:
        """Yield the lines of a piece that are not blank."""
        with self.files[piece["file"]].open("rb") as stream:
            stream.seek(piece["begin"])
            left = piece["end"] - piece["begin"]
            while left > 0:
                line = stream.readline(left)
                if not line:
                    return
                left -= len(line)
                if stripped := line.strip():
                    yield stripped

    def records(self) -> Iterator[bytes]:
        """Yield the lines of all files that are not blank."""
        for file in self.files:
            yield from iterate_lines(file)


def _piece(file: int, begin: int, end: int, count: int) -> Piece:
    # By its number: the files may have been moved, with their project, when the piece is read.
    return Piece(count, {"file": file, "begin": begin, "end": end})


def check_manifest(path: Path) -> None:
    """Prove that a file can be read as JSON lines at all.

    Raises:
        ConfigError: it is missing, empty, binary, compressed, in another encoding, one JSON array, a table, or cut off
            in its last line.
    """
    head, tail = read_ends(path, "manifest")
    _check_head(path, head)
    if not tail.endswith(b"\n"):
        _check_last_line(path, tail.rsplit(b"\n", 1)[-1])


def _bad(path: Path, sentence: str) -> ConfigError:
    return bad_file(path, "manifest", sentence)


def _check_head(path: Path, head: bytes) -> None:
    """Raise ConfigError where a file that begins with ``head`` is no JSON lines in UTF-8."""
    for mark, encoding in _BOMS.items():
        if head.startswith(mark):
            raise _bad(path, f"is {encoding}; save it as plain UTF-8")
    if b"\0" in head:
        raise _bad(path, "is binary or UTF-16, not lines of JSON in UTF-8")
    lines = [line.strip() for line in head.splitlines() if line.strip()]
    if lines[0].startswith(b"["):
        raise _bad(path, f"is one JSON array; {_ONE_PER_LINE}")
    if lines[0] == b"{":
        raise _bad(path, f"is JSON of which a record takes several lines; {_ONE_PER_LINE}")
    # A bad line is a reject; where no line at all begins like a record, the file is of another kind.
    if not any(line.startswith(b"{") for line in lines):
        looks_like = (
            "a table (CSV or TSV)" if any(mark in lines[0] for mark in (b",", b"\t", b";", b"|")) else "plain text"
        )
        raise _bad(path, f"is {looks_like}, not lines of JSON; {_ONE_PER_LINE}")


def _check_last_line(path: Path, line: bytes) -> None:
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(
            path, "seems to be cut off: its last line is not complete JSON; copy it again, or remove that line"
        ) from error
