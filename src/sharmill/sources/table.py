"""Tables: CSV and TSV files with one utterance per row; the first row or the configuration names the columns."""

import csv
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Final, Literal

import msgspec

from sharmill.config import require
from sharmill.errors import RejectRecord, refuse
from sharmill.files.location import Location
from sharmill.registry import nearest
from sharmill.sources import ColumnSource, DescribedRecord, EncodedSource, LineSource, RawRecord, UnreadableRecord
from sharmill.sources.files import bad_file, check_text, open_lines, refusing_damage, unpacked_name
from sharmill.sources.speakers import Template

_MAX_LINE_BYTES: Final = 64 << 20
# Tables with these delimiters usually contain no quoted cells.
_UNQUOTED: Final = "\t|"
_QUOTED: Final = (
    'cells look like quoted CSV, with "" inside quotes, and are kept unchanged; set the source\'s key quotes to true '
    "if the table is quoted, or to false if it is not"
)
# Excel's optional first line, which names the delimiter.
_SEPARATOR: Final = re.compile(rb"(?:\xef\xbb\xbf)?sep=(.)\r?\n")
# By default, Python's csv module accepts only 128 KiB per cell.
csv.field_size_limit(_MAX_LINE_BYTES)
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,100}(\.[0-9]{0,100})?([eE][+-]?[0-9]{1,2})?")


def delimiter_of(name: str) -> str:
    """Return the delimiter that a table's file name implies: a tab for ``.tsv``, otherwise a comma."""
    return "\t" if unpacked_name(name).lower().endswith(".tsv") else ","


@dataclass(frozen=True, kw_only=True)
class TableSource(LineSource, EncodedSource, ColumnSource):
    """Records of tables: CSV or TSV files with one utterance per row."""

    file_keys: ClassVar[tuple[str, ...]] = ("table",)
    type: str = "table"
    table: str | list[str]
    """Path of the table, or a list of paths, as for ``manifest`` of ``nemo``."""
    delimiter: str = ","
    """Delimiter between cells: ``","``, ``"|"``, ``"\\t"`` (a tab) or another character."""
    header: list[str] | None = None
    """Column names, for tables without a header row; ``null`` reads them from the first row."""
    quotes: bool | None = None
    """``true``: cells may be in double quotes, with delimiters and newlines inside. ``false``: quotes are ordinary
    characters. ``null`` means ``false`` if the delimiter is a tab or ``|``, otherwise ``true``; a cell that contains
    both a delimiter and a newline is then rejected as ``malformed``."""
    audio: str | None = None
    """Template for ``audio_filepath`` with columns, such as ``wavs/{id}.wav``; ``null`` uses the column
    ``audio_filepath``."""
    decimal: Literal[".", ","] = "."
    """Decimal separator of numbers; ``","`` reads ``2,5``."""
    numbers: list[str] = field(default_factory=list)
    """Keys with numbers besides ``duration`` and ``offset``, such as ``cer`` for filters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_one = len(self.delimiter) == 1 and self.delimiter not in '"\r\n'
        require(is_one, f"delimiter {self.delimiter!r} must be one character")
        problem = None if self.header is None else _name_problem(self.header)
        require(problem is None, f"header {problem}")
        self._audio  # noqa: B018 (raises if the template is not valid)

    @cached_property
    def _audio(self) -> Template | None:
        return None if self.audio is None else Template(self.audio)

    def check(self) -> None:
        """Raise ConfigError if a file cannot be a table, or lacks a column that the configuration names."""
        wanted = {f"columns.{key}": column for key, column in self.columns.items()}
        if self._audio is not None:
            wanted |= {f"audio: {self.audio}": column for column in self._audio.keys}
        elif "audio_filepath" not in self.columns:
            wanted["audio_filepath"] = "audio_filepath"
        for file in self.files:
            mark = _SEPARATOR.match(check_text(file, "table"))
            is_other = mark is not None and mark[1] != self.delimiter.encode()
            refuse(
                (
                    is_other,
                    f"the first line of {file} is sep={mark and mark[1].decode()}; set delimiter to this character",
                )
            )
            names = self._names(file)
            problem = _name_problem(names)
            refuse((problem, f"the first row of {file} {problem}"))
            other = Counter(mark for mark in "".join(names) if mark in ",;\t|").most_common(1)
            hint = f"; if {other[0][0]!r} separates the cells, set delimiter to it" if other else ""
            refuse(
                *(
                    (
                        column not in names,
                        f"{where}: the table {file} has no column {column!r}{nearest(column, names)}{hint}",
                    )
                    for where, column in wanted.items()
                ),
                code="unknown_key",
            )

    def lines(self, number: int, begin: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield (end position, row) for the nonblank rows of a file from ``begin`` on.

        A readable row is a tuple of column names and cells.
        """
        file = self.files[number]
        names = self._names(file)
        is_header = self.header is None and begin == 0
        for end, row in itertools.islice(self._rows(file, begin, names), int(is_header), None):
            yield end, row if isinstance(row, UnreadableRecord) else (names, row)

    def record(self, entry: tuple[list[str], list[str]]) -> RawRecord:
        """Return the record of a row."""
        names, row = entry
        if not _is_complete(row, names):
            behind = self.delimiter.join(row[len(names) :]).strip()[:40]
            where = f": {behind!r} follows its last column" if behind else ""
            raise RejectRecord("malformed", f"the row has {len(row)} cells for {len(names)} columns{where}")
        cells = dict(zip(names, row, strict=False))
        record = self.name_keys(cells)
        if self._audio is not None:
            try:
                record["audio_filepath"] = self._audio.fill(cells, "")
            except ValueError:
                record.pop("audio_filepath", None)
        for key in ("duration", "offset", "channel", *self.numbers):
            if key in record:
                record[key] = _number(record[key], self.decimal)
        encoded = msgspec.json.encode(record)
        is_in_doubt = self.quotes is None and self.delimiter in _UNQUOTED
        num_quoted = sum(cell[:1] == '"' and '""' in cell for cell in row) if is_in_doubt else 0
        return DescribedRecord(encoded, notes={_QUOTED: num_quoted}) if num_quoted else encoded

    def shown(self, entry: tuple[list[str], list[str]]) -> str:
        """Return the cells of a row."""
        return self.delimiter.join(entry[1])

    @cached_property
    def _names(self) -> Callable[[Location], list[str]]:
        """The function that returns a file's column names; its last result is cached."""
        return lru_cache(maxsize=1)(self._read_names)

    def _read_names(self, file: Location) -> list[str]:
        """Return the column names, without an empty name after a trailing delimiter."""
        row = next((row for _, row in self._rows(file)), [""]) if self.header is None else self.header
        if isinstance(row, UnreadableRecord):
            raise bad_file(file, "table", f"has an unreadable first row: {row.detail}")
        names = [name.strip() for name in row]
        return names[:-1] if names[-1:] == [""] else names

    def _rows(
        self, file: Location, begin: int = 0, names: list[str] | None = None
    ) -> Iterator[tuple[int, list[str] | UnreadableRecord]]:
        """Yield (end position, cells) for every nonblank row from ``begin`` on.

        If a row is not valid CSV, or spans several lines without having a cell for each of the columns ``names``, only
        its first line is rejected, and the next row starts on the line after it. A stray quote therefore does not
        swallow further rows.
        """
        has_quotes = self.delimiter not in _UNQUOTED if self.quotes is None else self.quotes
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE
        # Keep the stream open for the next piece, as LineSource does.
        stream = self._open(file) if begin else open_lines(file, "table")
        with refusing_damage(file, "table"):
            if begin == 0 and (mark := _SEPARATOR.match(stream.readline(_MAX_LINE_BYTES))):
                begin = len(mark[0])
            while True:
                stream.seek(begin)
                # Bytes that cannot be decoded become surrogates, which are rejected later.
                lines = (
                    line.decode(self.encoding, "surrogateescape").removeprefix("\ufeff")
                    for line in iter(functools.partial(stream.readline, _MAX_LINE_BYTES), b"")
                )
                try:
                    for cells in csv.reader(lines, delimiter=self.delimiter, quoting=quoting, strict=True):
                        over_lines = [cell for cell in cells if "\n" in cell]
                        if over_lines and (
                            (names is not None and not _is_complete(cells, names))
                            or (self.quotes is None and any(self.delimiter in cell for cell in over_lines))
                        ):
                            raise csv.Error(
                                "a quoted cell spans several lines and may have swallowed rows; set quotes: false in "
                                "the source if quotes are ordinary characters, or quotes: true if such cells are right"
                            )
                        begin = stream.tell()
                        if row := self._check_row(cells):
                            yield begin, row
                    return
                except csv.Error as error:
                    stream.seek(begin)
                    line = stream.readline(_MAX_LINE_BYTES)
                    begin += len(line)
                    text = line.decode(self.encoding, "replace").strip()
                    yield begin, UnreadableRecord("malformed", f"the row is not valid CSV: {error}", text)

    def _check_row(self, row: list[str]) -> list[str] | UnreadableRecord:
        text = self.delimiter.join(row)
        if not text.strip(f"{self.delimiter} \t"):
            return []
        if any("\udc80" <= letter <= "\udcff" for letter in text):
            shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            return UnreadableRecord(
                "malformed", f"the row is not valid {self.encoding}; set the key encoding of the source", shown
            )
        return row


def _is_complete(row: list[str], names: list[str]) -> bool:
    """Return True if a row has a cell for each column, optionally with a trailing delimiter."""
    return len(row) == len(names) or (len(row) == len(names) + 1 and not row[-1].strip())


def _name_problem(names: list[str]) -> str | None:
    """Return a message if the column names are invalid, otherwise None."""
    if names and len(set(names)) == len(names) and all(names):
        return None
    return f"must give every column a different, nonempty name: {', '.join(names)}"


def _number(cell: str, decimal: str) -> Any:
    """Return a cell as a number, None if it is empty, or its text if it is not a number."""
    text = cell.strip()
    if decimal == ",":  # a point then separates thousands
        text = text.replace(".", " ").replace(",", ".")
    if not _NUMBER.fullmatch(text):
        return cell.strip() or None
    return float(text) if set(text) & set(".eE") else int(text)
