"""One open shard: its cuts, in any order, each with its item of the chosen fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from lhotse.cut import Cut

from sharmill.errors import DamagedShard
from sharmill.shar.cut_lines import NOT_JSON, read_lines
from sharmill.shar.items import NO_DATA, ItemTable
from sharmill.shar.layout import CUTS
from sharmill.shar.reading.cuts import MALFORMED, read_cut, read_item
from sharmill.shar.reading.shard_source import ShardFiles

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class OpenShard:
    """A shard whose files are open, with all that can be seen without decoding items looked at already.

    Raises:
        DamagedShard: when it is made, where a file is not as it should be.
    """

    def __init__(self, files: ShardFiles) -> None:
        self.index = files.index
        self._lines = read_lines(files.cuts)
        if files.count not in (None, len(self._lines)):
            raise self.damage(f"there are {len(self._lines)} {CUTS} instead of {files.count}")
        self._columns: dict[str, _TarColumn | _LinesColumn] = {}
        try:
            for name, path in files.fields.items():
                column = _TarColumn(path) if path.suffix == ".tar" else _LinesColumn(path, name)
                self._columns[name] = column
                if len(column) != len(self._lines):
                    raise self.damage(f"{name} ({path}) has {len(column)} items for {len(self._lines)} {CUTS}")
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        for column in self._columns.values():
            column.close()

    def read(self, number: int) -> tuple[Cut, dict[str, Any]]:
        """Read a cut, and the fields' items for it: lhotse's manifests with data, or None for a placeholder.

        Raises:
            DamagedShard: anything is not as it should be.
        """
        try:
            cut = read_cut(_decode_json(self._lines[number]))
            cut_id = cut.id
        except NOT_JSON as error:
            raise self.damage(f"cut {number} is not JSON: {error}") from error
        except MALFORMED as error:
            raise self.damage(f"cut {number} is not a cut that can be read: {error!r}") from error
        return cut, {name: column.read(number, cut_id) for name, column in self._columns.items()}

    def damage(self, what: str) -> DamagedShard:
        return DamagedShard(f"shard {self.index}: {what}")


class _TarColumn:
    """A field in a tar archive."""

    def __init__(self, path: Path) -> None:
        self._table = ItemTable(path)
        self.close = self._table.close

    def __len__(self) -> int:
        return len(self._table)

    def read(self, number: int, cut_id: str) -> Any:
        table = self._table
        found, extension = table.pair(number)
        member = f"{found}.{extension}"
        if found != cut_id:
            raise table.damage(f"member {member!r} is where one for {cut_id!r} should be")
        if extension == NO_DATA:
            return None
        try:
            return read_item(_decode_json(table.metadata(number)), extension, table.data(number))
        except NOT_JSON as error:
            raise table.damage(f"the metadata of {member!r} is not JSON: {error}") from error
        except MALFORMED as error:
            raise table.damage(f"the metadata of {member!r} cannot be read: {error!r}") from error
        except DamagedShard as error:
            raise table.damage(f"member {member!r}: {error}") from error


class _LinesColumn:
    """A field in lhotse's JSON lines: an id, and any value."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._lines = read_lines(path)

    def __len__(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        """Do nothing: no file is open."""

    def read(self, number: int, cut_id: str) -> Any:
        try:
            values = _decode_json(self._lines[number])
        except NOT_JSON as error:
            raise DamagedShard(f"{self._path}: item {number} is not JSON: {error}") from error
        if values.get("cut_id") != cut_id:
            raise DamagedShard(f"{self._path}: item {number} is that of {values.get('cut_id')!r}, not of {cut_id!r}")
        return values.get(self._name)


def _decode_json(line: bytes) -> dict[str, Any]:
    try:
        return _decode(line)
    except msgspec.DecodeError as error:
        # Python writes NaN and Infinity, which are no JSON, and lhotse with it.
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise error from None
        if not isinstance(values, dict):
            raise
        return values
