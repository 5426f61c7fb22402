"""NeMo manifests: JSON lines, in one file or in numbered shards."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from sharmill.errors import ConfigError
from sharmill.manifest import iterate_lines
from sharmill.sources import Piece, Source
from sharmill.storage import checksum

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_SHARDS = 1_000_000
# A file with a longer line is no manifest, and would be read into memory as a whole.
_MAX_LINE_BYTES = 64 << 20
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
_ONE_PER_LINE = (
    "write each record on a line of its own, as a JSON object with audio_filepath, duration, speaker and text"
)
_BOMS = {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    codecs.BOM_UTF8: "UTF-8 with a byte order mark",
}


@dataclass(frozen=True, kw_only=True)
class NemoSource(Source):
    """Records of NeMo manifests: JSON lines, one utterance a line."""

    type: str = "nemo"
    """Kind of the source: ``nemo``, one that another package declares, or ``python:package.module:Class``."""
    manifest: str
    """Path of the manifest. It may name shards: ``manifest__OP_0..63_CL_.json`` or ``manifest_{0..63}.json``."""
    audio_root: str
    """Folder that ``audio_filepath`` is relative to. Audio outside this folder is rejected."""

    def __post_init__(self) -> None:
        for key in ("manifest", "audio_root"):
            if not getattr(self, key).strip():
                raise ValueError(f"{key} must not be empty")

    @cached_property
    def files(self) -> list[Path]:
        """The files that ``manifest`` names, in order."""
        return [Path(name) for name in expand_shards(self.manifest)]

    def check(self) -> None:
        """Raise ConfigError where a file cannot be a manifest."""
        for file in self.files:
            check_manifest(file)

    def identity(self) -> dict[str, Any]:
        """Return the size and checksum of every file, by its name; also prove that each can be read as a manifest."""
        self.check()
        return {str(file): [file.stat().st_size, checksum(file)] for file in self.files}

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

    def stem(self) -> str | None:
        """Return the name of the manifest without its suffix; None for a pattern."""
        return None if "{" in self.manifest or "_OP_" in self.manifest else Path(self.manifest).stem

    def paths(self) -> dict[str, str]:
        """Return the keys that are paths, and the paths."""
        return {"manifest": self.manifest, "audio_root": self.audio_root}


def _piece(file: int, begin: int, end: int, count: int) -> Piece:
    # By its number: the files may have been moved, with their project, when the piece is read.
    return Piece(count, {"file": file, "begin": begin, "end": end})


def expand_shards(pattern: str) -> list[str]:
    """Return the names that a pattern stands for: ``_OP_`` and ``_CL_`` are braces, as in NeMo, and ``{a..b}`` counts.

    >>> expand_shards("m__OP_8..10_CL_.json")
    ['m_8.json', 'm_9.json', 'm_10.json']
    """
    match = _RANGE.search(pattern.replace("_OP_", "{").replace("_CL_", "}"))
    if match is None:
        return [pattern]
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise ConfigError(
            f"the range in {pattern} runs backwards; write the lower number first", code="bad_config_value"
        )
    if last - first >= _MAX_SHARDS:
        raise ConfigError(f"the range in {pattern} names more than {_MAX_SHARDS:,} files", code="bad_config_value")
    names = [f"{match.string[: match.start()]}{n:0{len(match[1])}d}{match.string[match.end() :]}"
             for n in range(first, last + 1)]  # fmt: skip
    return [name for expanded in names for name in expand_shards(expanded)]


def check_manifest(path: Path) -> None:
    """Prove that a file can be read as JSON lines at all.

    Raises:
        ConfigError: it is missing, empty, binary, compressed, in another encoding, one JSON array, a table, or cut off
            in its last line.
    """
    try:
        # Before opening: a FIFO would wait for its writer.
        if path.is_dir():
            raise _bad(path, "is a folder; name the manifest file in it")
        if path.exists() and not path.is_file():
            raise _bad(path, "is not a regular file; copy its content into one")
        with path.open("rb") as stream:
            head = stream.read(1 << 16)
            stream.seek(max(0, path.stat().st_size - (1 << 20)))
            tail = stream.read()
    except OSError as error:
        raise ConfigError(
            f"cannot read the manifest {path}: {error.strerror}; {_remedy_of_path(path)}", code="missing_input"
        ) from error
    _check_head(path, head)
    if not tail.endswith(b"\n"):
        _check_last_line(path, tail.rsplit(b"\n", 1)[-1])


def _bad(path: Path, sentence: str) -> ConfigError:
    return ConfigError(f"the manifest {path} {sentence}", code="bad_manifest")


def _remedy_of_path(path: Path) -> str:
    name = str(path)
    if name.startswith("~"):
        return "'~' stands for a home folder in shells only; write the whole path"
    if "*" in name or "?" in name:
        return "'*' and '?' find no files here; name numbered files as manifest_{0..63}.json, or list several sources"
    if not path.is_absolute():
        return f"the path is relative to {Path.cwd()}; correct manifest in sources, or run from its folder"
    return "correct manifest in sources"


def _check_head(path: Path, head: bytes) -> None:
    """Raise ConfigError where a file that begins with ``head`` is no JSON lines in UTF-8."""
    if not head.strip():
        raise _bad(path, "is empty")
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise _bad(path, f"is compressed ({name}); unpack it, and name the unpacked file")
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad(
            path, "seems to be cut off: its last line is not complete JSON; copy it again, or remove that line"
        ) from error
