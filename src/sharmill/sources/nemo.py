"""NeMo manifests: JSON lines, in one file or in numbered shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from sharmill.errors import RejectRecord
from sharmill.manifest import iterate_lines
from sharmill.sources import FileSource, Piece
from sharmill.sources.files import bad_file, open_input
from sharmill.sources.json_lines import MAX_LINE_BYTES, check_json_lines

_ONE_PER_LINE = (
    "write each record on a line of its own, as a JSON object with audio_filepath, duration, speaker and text"
)
_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, kw_only=True)
class NemoSource(FileSource):
    """Records of NeMo manifests: JSON lines, one utterance a line."""

    file_keys: ClassVar[tuple[str, ...]] = ("manifest",)
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
            with open_input(file, "manifest") as stream:
                while line := stream.readline(MAX_LINE_BYTES + 1):
                    if len(line) > MAX_LINE_BYTES:
                        raise bad_file(file, "manifest", f"has a line of more than 64 MiB; {_ONE_PER_LINE}")
                    end += len(line)
                    count += bool(line.strip())
                    if count == records_per_piece:
                        yield _piece(number, begin, end, count)
                        begin, count = end, 0
            if count:
                yield _piece(number, begin, end, count)

    def read(self, piece: dict[str, Any]) -> Iterator[bytes]:
        """Yield the lines of a piece that are not blank."""
        with open_input(self.files[piece["file"]], "manifest") as stream:
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
    check_json_lines(path, "manifest", _ONE_PER_LINE)


def decode_json_record(line: bytes, keys: Sequence[str]) -> tuple[dict[str, msgspec.Raw], list[Any]]:
    """Return a record whose values stay as they are written, and what some keys of it have; None for a missing one.

    Raises:
        RejectRecord: malformed.
    """
    try:
        record = _decoder.decode(line)
        return record, [msgspec.json.decode(record[key]) if key in record else None for key in keys]
    except msgspec.ValidationError as error:
        raise RejectRecord("malformed", "the line is not a JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RejectRecord("malformed", f"the line is not JSON: {error}") from error
