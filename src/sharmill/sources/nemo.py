"""NeMo manifests: JSON lines, in one file or in numbered shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import msgspec

from sharmill.errors import RejectRecord
from sharmill.sources import FileSource, Piece
from sharmill.sources.lines import LineReader, check_json_lines

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
        """Raise ConfigError where a file cannot be a manifest.

        It may be missing, empty, binary, compressed, in another encoding, one JSON array, a table, or cut off.
        """
        for file in self.files:
            check_json_lines(file, "manifest", _ONE_PER_LINE)

    @cached_property
    def _lines(self) -> LineReader:
        return LineReader(self.files, "manifest")

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of lines, each found again by its place."""
        return self._lines.pieces(records_per_piece)

    def read(self, piece: dict[str, Any]) -> Iterator[bytes]:
        """Yield the lines of a piece that are not blank."""
        return self._lines.read(piece, lambda line: (line,))


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
