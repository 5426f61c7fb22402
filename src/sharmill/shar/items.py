"""The items of a field: for each cut a pair of members of an archive, data and its lhotse manifest, or a value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sharmill.errors import DamagedShard
from sharmill.shar.cut_lines import NOT_JSON, decode_cut, read_lines
from sharmill.shar.tar import TarTable, TarWriter

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, Any])

NO_DATA = "nodata"
_NO_METADATA = "nometa"


@dataclass(frozen=True, slots=True)
class Item:
    """The data of a cut in a field, in the format that ``extension`` names, and the lhotse manifest of it.

    Both are None for a placeholder, which says that the cut has nothing in this field. The item of a field of values
    has no data either: its metadata are the value by the attribute of the cut.
    """

    cut_id: str
    extension: str
    data: bytes | None
    metadata: dict[str, Any] | None


class FieldWriter:
    """Writer of one tar field of one shard. Only leaving the ``with`` block without an error completes the archive."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._tar = TarWriter(self._stream)

    def __enter__(self) -> FieldWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if kind is None:
                self._tar.finish()
        finally:
            self._stream.close()

    def add(self, item: Item) -> None:
        """Append the pair of members of one cut: data first, its metadata next, as lhotse reads them."""
        if item.data is None:
            self._tar.add(f"{item.cut_id}.{NO_DATA}", b"")
            self._tar.add(f"{item.cut_id}.{_NO_METADATA}", b"")
        else:
            self._tar.add(f"{item.cut_id}.{item.extension}", item.data)
            self._tar.add(f"{item.cut_id}.json", _encoder.encode(item.metadata) + b"\n")

    def copy(self, table: ItemTable, number: int) -> str:
        """Append the pair of members of an item of another archive as they are, and return its cut id.

        Raises:
            DamagedShard: the two do not belong together.
        """
        cut_id, extension = table.pair(number)
        self._tar.add(f"{cut_id}.{extension}", table.data(number))
        self._tar.add(f"{cut_id}.{_second_extension(extension)}", table.metadata(number))
        return cut_id


class ItemTable:
    """The items of a tar field, taken in any order from an archive that stays open.

    Raises:
        DamagedShard: the archive is not there or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table = TarTable(path)
        self.close = self._table.close

    def __len__(self) -> int:
        # An odd member counts as an item, so that it is not overlooked.
        return (len(self._table) + 1) // 2

    @property
    def offsets(self) -> list[int]:
        """The position of each item in the file, and at the end the size of the file."""
        return [*self._table.offsets[::2], self._table.size]

    def pair(self, number: int) -> tuple[str, str]:
        """Return the cut id and the extension of an item.

        Raises:
            DamagedShard: its two members do not belong together.
        """
        return pair_names(self._path, self._table.names[2 * number : 2 * number + 2])

    def place(self, number: int) -> tuple[int, int]:
        """Return the position of the data of an item in the file, and its number of bytes."""
        return self._table.place(2 * number)

    def data(self, number: int) -> bytes:
        """Return the bytes of the first member of an item."""
        return self._table.read(2 * number)

    def metadata(self, number: int) -> bytes:
        """Return the JSON of the second member of an item."""
        return self._table.read(2 * number + 1)

    def item(self, number: int, *, copy: bool = True) -> Item:
        """Return an item; without ``copy`` its data is a view of the file, which must stay open then.

        Raises:
            DamagedShard: its members do not belong together, or its metadata are not JSON.
        """
        cut_id, extension = self.pair(number)
        if extension == NO_DATA:
            return Item(cut_id, extension, None, None)
        try:
            metadata = _decoder.decode(self.metadata(number))
        except NOT_JSON as error:
            raise self.damage(f"the metadata of '{cut_id}.{extension}' is not JSON: {error}") from error
        # A view serves as bytes.
        data: Any = self._table.read(2 * number) if copy else self._table.view(2 * number)
        return Item(cut_id, extension, data, metadata)

    def damage(self, what: str) -> DamagedShard:
        """Return the error that says what is wrong with this archive."""
        return DamagedShard(f"{self._path}: {what}")


class ValueTable:
    """The items of a field of values, as ``ItemTable``.

    Raises:
        DamagedShard: the file is not there or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = read_lines(path)

    def __len__(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        """Do nothing: no file is open."""

    def line(self, number: int) -> bytes:
        """Return the line of an item."""
        return self._lines[number]

    def item(self, number: int, *, copy: bool = True) -> Item:
        """Return an item.

        Raises:
            DamagedShard: the line is not JSON, or has no id of a cut.
        """
        values = decode_cut(self._path, self._lines[number])
        cut_id = values.pop("cut_id", None)
        if not isinstance(cut_id, str):
            raise self.damage(f"item {number} has no cut_id")
        return Item(cut_id, "json", None, values or None)

    def damage(self, what: str) -> DamagedShard:
        """Return the error that says what is wrong with this file."""
        return DamagedShard(f"{self._path}: {what}")


def open_items(path: Path) -> ItemTable | ValueTable:
    """Open the items of a file of a field, by its name a tar archive or JSON lines; raises as these."""
    return ItemTable(path) if path.suffix == ".tar" else ValueTable(path)


def pair_names(path: Path, names: list[str]) -> tuple[str, str]:
    """Return the cut id and the extension of an item from the names of its members in an archive.

    Raises:
        DamagedShard: they do not belong together.
    """
    first = names[0] if names else ""
    cut_id, _, extension = first.rpartition(".")
    expected = f"{cut_id}.{_second_extension(extension)}"
    if len(names) != 2 or names[1] != expected:
        raise DamagedShard(f"{path}: member {first!r} has no {expected!r} beside it")
    return cut_id, extension


def _second_extension(extension: str) -> str:
    return _NO_METADATA if extension == NO_DATA else "json"


def read_field(path: Path) -> Iterator[Item]:
    """Yield the items of a file of a field, in order.

    Raises:
        DamagedShard: the file is not there or damaged, or has something else in it.
    """
    with closing(open_items(path)) as table:
        for number in range(len(table)):
            yield table.item(number)
