"""Tables: CSV and TSV files, one utterance a row, with the columns named by their first row or by the configuration."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

import msgspec

from sharmill.errors import ConfigError
from sharmill.registry import nearest
from sharmill.sources import FileSource, Piece, Unreadable
from sharmill.sources.files import bad_file, check_encoding, open_input, read_ends
from sharmill.sources.speakers import Template

_MAX_LINE_BYTES: Final = 64 << 20
# Of a record these are no texts; ``numbers`` names further ones.
_NUMBERS: Final = ("duration", "offset")
_DELIMITERS: Final = ",;\t|"
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,100}(\.[0-9]{0,100})?([eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True, kw_only=True)
class TableSource(FileSource):
    """Records of tables: CSV or TSV files, one utterance a row."""

    file_keys: ClassVar[tuple[str, ...]] = ("table",)
    type: str = "table"
    table: str | list[str]
    """Path of the table, or a list of them; as ``manifest`` of ``nemo`` it may name shards, or have ``*`` and ``?``."""
    delimiter: str = ","
    """Character between the cells of a row: ``","``, ``"|"``, ``"\\t"`` (a tab) or another."""
    header: list[str] | None = None
    """Names of the columns of tables that do not name them; ``null``: the first row has the names."""
    quotes: bool = True
    """Cells may stand in double quotes, with delimiters and newlines in them. ``false``: quotes are letters."""
    encoding: str = "utf-8"
    """Encoding of the table, such as ``latin-1``. Rows that cannot be decoded are rejected as ``malformed``."""
    columns: dict[str, str] = field(default_factory=dict)
    """Keys of records and the columns that they come from, ``{text: sentence}``. Other columns keep their names."""
    audio: str | None = None
    """Template of ``audio_filepath`` over the columns, such as ``wavs/{id}.wav``; ``null`` takes the column itself."""
    numbers: list[str] = field(default_factory=list)
    """Keys whose cells are numbers, beside ``duration`` and ``offset``: those of filters, such as ``cer``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise ValueError(f"delimiter {self.delimiter!r} must be one character")
        check_encoding(self.encoding)
        if self.header is not None:
            _check_names(self.header, "header")
        self._audio  # noqa: B018 (raises where it is no template)

    @cached_property
    def _audio(self) -> Template | None:
        return None if self.audio is None else Template.parse(self.audio)

    def check(self) -> None:
        """Raise ConfigError where a file cannot be a table, or lacks a column that the configuration names."""
        for file in self.files:
            head, _ = read_ends(file, "table")
            if b"\0" in head:
                raise bad_file(file, "table", "is binary or UTF-16; save it as UTF-8")
            self._check_columns(file, self._columns_of(file))

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of rows, each found again by its byte range."""
        for number, file in enumerate(self.files):
            begin = end = count = 0
            has_names = self.header is None
            for _, end, row in self._rows(file, 0, file.stat().st_size):
                if row and has_names:
                    begin, has_names = end, False
                    continue
                count += bool(row)
                if count == records_per_piece:
                    yield Piece(count, {"file": number, "begin": begin, "end": end})
                    begin, count = end, 0
            if count:
                yield Piece(count, {"file": number, "begin": begin, "end": end})

    def read(self, piece: dict[str, Any]) -> Iterator[bytes | Unreadable]:
        """Yield the rows of a piece that are not empty."""
        file = self.files[piece["file"]]
        names = self._columns_of(file)
        for _, _, row in self._rows(file, piece["begin"], piece["end"]):
            if isinstance(row, Unreadable):
                yield row
            elif row and len(row) != len(names):
                text = self.delimiter.join(row)
                yield Unreadable("malformed", f"the row has {len(row)} cells, and there are {len(names)} columns", text)
            elif row:
                yield msgspec.json.encode(self._record(dict(zip(names, row, strict=True))))

    def _record(self, cells: dict[str, str]) -> dict[str, Any]:
        """Return the record of a row."""
        mapped = {*self.columns, *self.columns.values()}
        record: dict[str, Any] = {column: cell for column, cell in cells.items() if column not in mapped}
        record |= {key: cells[column] for key, column in self.columns.items()}
        if self._audio is not None:
            try:
                record["audio_filepath"] = self._audio.fill(cells, "")
            except ValueError:
                record.pop("audio_filepath", None)
        for key in (*_NUMBERS, "channel", *self.numbers):
            if key in record:
                record[key] = _number(record[key])
        return record

    def _columns_of(self, file: Path) -> list[str]:
        if self.header is not None:
            return self.header
        row = next((row for _, _, row in self._rows(file, 0, 1 << 20) if row), [])
        if isinstance(row, Unreadable):
            raise bad_file(file, "table", f"has a first row that cannot be read: {row.detail}")
        row[0] = row[0].removeprefix("\ufeff")
        return [name.strip() for name in row]

    def _check_columns(self, file: Path, names: list[str]) -> None:
        """Raise ConfigError where columns are named twice, or one that is needed is not there."""
        try:
            _check_names(names, f"the first row of {file}")
        except ValueError as error:
            raise ConfigError(str(error), code="bad_config_value") from error
        wanted = {f"columns.{key}": column for key, column in self.columns.items()}
        if self._audio is not None:
            wanted |= {f"audio: {self.audio}": column for column in self._audio.keys}
        elif "audio_filepath" not in self.columns:
            wanted["audio_filepath"] = "audio_filepath"
        for where, column in wanted.items():
            if column not in names:
                other = Counter(mark for mark in "".join(names) if mark in _DELIMITERS).most_common(1)
                hint = f"; if {other[0][0]!r} is between the cells, say so with delimiter" if other else ""
                raise ConfigError(
                    f"{where}: the table {file} has no column {column!r}{nearest(column, names)}{hint}",
                    code="unknown_key",
                )

    def _rows(self, file: Path, begin: int, end: int) -> Iterator[tuple[int, int, list[str] | Unreadable]]:
        """Yield (begin, end, cells) of every row that begins in a range of bytes; blank rows have no cells.

        A row that is no CSV is one line, and the next row begins behind it.
        """
        with open_input(file, "table") as stream:
            while begin < end:
                stream.seek(begin)
                lines = _Lines(stream, self.encoding)
                reader = csv.reader(
                    lines,
                    delimiter=self.delimiter,
                    quoting=csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE,
                    strict=True,
                )
                try:
                    for row in reader:
                        yield begin, begin + lines.num_bytes, self._checked(row)
                        begin += lines.num_bytes
                        lines.num_bytes = 0
                        if begin >= end:
                            return
                    return
                except csv.Error as error:
                    stream.seek(begin)
                    line = stream.readline(_MAX_LINE_BYTES)
                    text = line.decode(self.encoding, "replace").strip()
                    yield begin, begin + len(line), Unreadable("malformed", f"the row is no CSV: {error}", text)
                    begin += len(line)

    def _checked(self, row: list[str]) -> list[str] | Unreadable:
        text = self.delimiter.join(row)
        if not text.strip(f"{self.delimiter} \t"):
            return []
        if any("\udc80" <= letter <= "\udcff" for letter in text):
            shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            return Unreadable("malformed", f"the row is not {self.encoding}; set encoding of the source", shown)
        return row


class _Lines:
    """The decoded lines of a stream, and how many bytes they had; what cannot be decoded becomes surrogates."""

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self._stream = stream
        self._encoding = encoding
        self.num_bytes = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._stream.readline(_MAX_LINE_BYTES):
            self.num_bytes += len(line)
            yield line.decode(self._encoding, "surrogateescape")


def _check_names(names: list[str], where: str) -> None:
    if not names or len(set(names)) < len(names) or not all(names):
        raise ValueError(f"{where} must name every column, each by another name: {', '.join(names)}")


def _number(cell: str) -> Any:
    """Return a cell as a number; None where it is empty, and the text itself where it is no number."""
    text = cell.strip()
    if not _NUMBER.fullmatch(text):
        return text or None
    return float(text) if set(text) & set(".eE") else int(text)
