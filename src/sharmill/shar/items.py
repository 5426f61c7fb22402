"""The items of a tar field: for each cut a pair of members, data and its lhotse manifest, or a placeholder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sharmill.errors import DamagedShard
from sharmill.shar.cut_lines import NOT_JSON
from sharmill.shar.tar import TarWriter, read_tar

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, Any])

NO_DATA = "nodata"
NO_METADATA = "nometa"


@dataclass(frozen=True, slots=True)
class Item:
    """What a field has for one cut: ``data`` in the format that ``extension`` names, and its lhotse manifest.

    Both are None for a placeholder, which says that the cut has nothing in this field.
    """

    cut_id: str
    extension: str
    data: bytes | None
    metadata: dict[str, Any] | None


class FieldWriter:
    """Writes one tar field of one shard; ``finish`` makes it complete."""

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
        """Appends the pair of members of one cut: data first, its metadata next, as lhotse reads them."""
        if item.data is None:
            self._tar.add(f"{item.cut_id}.{NO_DATA}", b"")
            self._tar.add(f"{item.cut_id}.{NO_METADATA}", b"")
        else:
            self._tar.add(f"{item.cut_id}.{item.extension}", item.data)
            self._tar.add(f"{item.cut_id}.json", _encoder.encode(item.metadata) + b"\n")


def read_field(path: Path) -> Iterator[Item]:
    """The items of a tar field, in order.

    Raises:
        DamagedShard: the archive is not there or damaged, or its members do not come in pairs.
    """
    members = read_tar(path)
    for first in members:
        second = next(members, None)
        cut_id, _, extension = first.name.rpartition(".")
        expected = f"{cut_id}.{NO_METADATA if extension == NO_DATA else 'json'}"
        if second is None or second.name != expected:
            raise DamagedShard(f"{path}: member {first.name!r} has no {expected!r} beside it")
        if extension == NO_DATA:
            yield Item(cut_id, extension, None, None)
            continue
        try:
            metadata = _decoder.decode(second.data)
        except NOT_JSON as error:
            raise DamagedShard(f"{path}: the metadata of {first.name!r} is not JSON: {error}") from error
        yield Item(cut_id, extension, first.data, metadata)
