"""The items of a field: the file of a shard contains one item for each cut.

In a field of values, an item is a line of JSON. In any other field, an item is a pair of archive members: the data, and
its lhotse manifest. With an index file, opening a file reads only the index, and each item is read separately. Without
one, opening a file reads all headers of an archive, or decompresses all lines.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from sharmill.errors import DamagedShard
from sharmill.files.atomic import open_new
from sharmill.files.location import Location
from sharmill.files.stored import NOT_JSON
from sharmill.shar.json_lines import decode_cut
from sharmill.shar.offsets import IndexedLines, open_indexed_lines, read_offsets
from sharmill.shar.tar import END, TarDamage, load, padded, walk, write_member

NO_DATA: Final = "nodata"
_NO_METADATA: Final = "nometa"

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Item:
    """The data of a cut in a field, in the format that ``extension`` names, and its lhotse manifest.

    Both are None for a placeholder, which means that the cut has nothing in this field. An item of a field of values
    has no data either: its metadata maps the attribute of the cut to the value.
    """

    cut_id: str
    extension: str
    data: bytes | None
    metadata: dict[str, Any] | None


class FieldWriter(AbstractContextManager["FieldWriter"]):
    """Writes the archive of a field in one shard, which is completed only if the ``with`` block exits without error."""

    def __init__(self, path: Path) -> None:
        self._stream = open_new(path)
        self._end = 0

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with self._stream:
            if kind is None:
                self._stream.write(END)

    def add(self, item: Item) -> int:
        """Append the pair of members of one cut: its data, then its metadata, in the order in which lhotse reads them.

        Return the offset of the data in the file.
        """
        if item.data is None:
            return self._add(item.cut_id, NO_DATA, b"", b"")
        return self._add(item.cut_id, item.extension, item.data, _encoder.encode(item.metadata) + b"\n")

    def copy(self, table: "ItemTable", number: int) -> None:
        """Append an item of another archive, copying its two members unchanged.

        Raises:
            DamagedShard: the two members do not belong together.
        """
        self._add(*table.raw(number))

    def _add(self, cut_id: str, extension: str, data: bytes, metadata: bytes) -> int:
        start = self._end + write_member(self._stream, f"{cut_id}.{extension}", data)
        second = f"{cut_id}.{_NO_METADATA if extension == NO_DATA else 'json'}"
        self._end = start + padded(len(data)) + write_member(self._stream, second, metadata) + padded(len(metadata))
        return start


class ItemTable:
    """The items of a tar archive, which can be read in any order. The archive stays open as long as the table is
    referenced.

    Args:
        path: path of the archive.
        index: the archive's index file. If it is given, opening reads nothing else, and headers are parsed only for
            requested items.
        ids: the ids of the cuts that the items must belong to.
        salvage: if the archive is damaged, keep the members before the damage.

    Attributes:
        names: names of the members, in order; with an index, only those of the item read last.
        headers: offsets of the first headers of these members.
        size: the size of the file in bytes.
        cut_off: with ``salvage``, the damage after the last member; otherwise None.

    Raises:
        DamagedShard: the archive is missing or damaged, or its items do not belong to the cuts.
    """

    def __init__(
        self, path: Location, *, index: Location | None = None, ids: Sequence[str] | None = None, salvage: bool = False
    ) -> None:
        self._path = path
        self._content = load(path, in_parts=index is not None)
        self.size = len(self._content)
        self._offsets = None if index is None else read_offsets(index, path, self.size)
        self._item = -1
        self.cut_off: DamagedShard | None = None
        try:
            self._parse(0, None if index is None else 0)
        except DamagedShard as damage:
            if not salvage:
                raise
            self.cut_off = damage
        if ids is not None:
            _require_ids(self, ids)

    def _parse(self, begin: int, end: int | None) -> None:
        """Fill the lists with the members between two offsets; if ``end`` is None, parse up to the end marker."""
        # Use lists of strings and integers, which the garbage collector ignores: a tuple for each member would double
        # its work.
        self.names: list[str] = []
        self.headers: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        try:
            for name, header, start, size in walk(self._content, begin, end, strict=True):
                self.names.append(name)
                self.headers.append(header)
                self._starts.append(start)
                self._ends.append(start + size)
        except TarDamage as damage:
            raise DamagedShard(f"{self._path} {damage}") from damage

    def _find(self, number: int) -> int:
        """Return the index of an item's first member in the lists; with an index file, they hold only this item."""
        if self._offsets is None:
            return 2 * number
        if number != self._item:
            self._item = -1
            begin, end = self._offsets[number : number + 2].tolist()
            self._parse(begin, None if end == self.size else end)
            self._item = number
        return 0

    def __len__(self) -> int:
        # An unpaired member at the end counts as an item, so that it is not overlooked.
        return (len(self.names) + 1) // 2 if self._offsets is None else len(self._offsets) - 1

    def pair(self, number: int) -> tuple[str, str]:
        """Return the cut id and the extension of an item.

        Raises:
            DamagedShard: its two members do not belong together.
        """
        place = self._find(number)
        first, second = (*self.names[place : place + 2], "", "")[:2]
        cut_id, _, extension = first.rpartition(".")
        expected = f"{cut_id}.{_NO_METADATA if extension == NO_DATA else 'json'}"
        if second != expected:
            raise self.damage(f"member {first!r} is not followed by {expected!r}")
        return cut_id, extension

    def raw(self, number: int) -> tuple[str, str, bytes, bytes]:
        """Return the cut id, extension, data and metadata of an item; raises the same error as ``pair``."""
        cut_id, extension = self.pair(number)
        first = self._find(number)
        return cut_id, extension, self.member(first), self.member(first + 1)

    def member(self, number: int) -> bytes:
        """Return the bytes of a member, given its index in the lists."""
        return self._content[self._starts[number] : self._ends[number]]

    def place(self, member: int) -> tuple[int, int]:
        """Return the offset of a member's data in the file, and the size of the data in bytes."""
        return self._starts[member], self._ends[member] - self._starts[member]

    def item(self, number: int, *, copy: bool = True) -> Item:
        """Return an item; without ``copy``, its data is a view of the file.

        Raises:
            DamagedShard: its members do not belong together, or its metadata is not JSON.
        """
        cut_id, extension = self.pair(number)
        if extension == NO_DATA:
            return Item(cut_id, extension, None, None)
        first = self._find(number)
        try:
            metadata = _decoder.decode(self.member(first + 1))
        except NOT_JSON as error:
            raise self.damage(f"the metadata of '{cut_id}.{extension}' is not JSON: {error}") from error
        # The type is Any because a view can be used like bytes.
        view: Any = memoryview(self._content)[self._starts[first] : self._ends[first]]
        return Item(cut_id, extension, bytes(view) if copy else view, metadata)

    def damage(self, what: str) -> DamagedShard:
        """Return the error for damage in this archive."""
        return DamagedShard(f"{self._path}: {what}")


class ValueTable:
    """The items of a field of values, stored in the lines of the file at ``path``."""

    def __init__(self, path: Location, lines: Sequence[bytes] | IndexedLines) -> None:
        self._path = path
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def line(self, number: int) -> bytes:
        """Return the line of an item."""
        return self._lines[number]

    def pair(self, number: int) -> tuple[str, str]:
        """Return the cut id of an item, and the extension ``json``; raises the same error as ``item``."""
        return self.item(number).cut_id, "json"

    def item(self, number: int, *, copy: bool = True) -> Item:
        """Return an item.

        Raises:
            DamagedShard: the line is not JSON, or has no cut id.
        """
        values = decode_cut(self._path, self._lines[number])
        cut_id = values.pop("cut_id", None)
        if not isinstance(cut_id, str):
            raise self.damage(f"item {number} has no cut_id")
        return Item(cut_id, "json", None, values or None)

    def damage(self, what: str) -> DamagedShard:
        """Return the error for damage in this file."""
        return DamagedShard(f"{self._path}: {what}")


def _require_ids(table: ItemTable | ValueTable, ids: Sequence[str]) -> None:
    if len(table) != len(ids):
        raise table.damage(f"{len(table)} items for {len(ids)} cuts")
    for number, cut_id in enumerate(ids):
        if (found := table.pair(number)[0]) != cut_id:
            raise table.damage(f"item {number} belongs to {found!r}, but the cut there is {cut_id!r}")


def open_items(
    path: Location, ids: Sequence[str] | None = None, *, sidecars: Sequence[Location] = ()
) -> ItemTable | ValueTable:
    """Open the items of a field's file: a tar archive if its name ends with ``.tar``, otherwise JSON lines.

    Args:
        ids: the ids of the cuts that the items must belong to.
        sidecars: the file's sidecars for random access, in the order of ``sidecar_files``; empty to read without them.

    Raises:
        DamagedShard: the file is missing or damaged, or its items do not belong to the cuts.
    """
    if path.name.endswith(".tar"):
        return ItemTable(path, index=sidecars[0] if sidecars else None, ids=ids)
    table = ValueTable(path, open_indexed_lines(path, sidecars))
    if ids is not None:
        _require_ids(table, ids)
    return table


def read_field(path: Location, ids: Sequence[str] | None = None) -> Iterator[Item]:
    """Iterate over the items of a field's file in order.

    Raises:
        DamagedShard: as for ``open_items``; the error may also be raised during the iteration.
    """
    table = open_items(path, ids)
    return map(table.item, range(len(table)))
