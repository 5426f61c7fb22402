"""Cuts of a dataset with all that is stored of them, found by their id, and the contents of its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sharmill.audio.files import decode_bytes
from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar.arrays import array_from_bytes
from sharmill.shar.cut_lines import decode_cut, read_lines
from sharmill.shar.index import ShardRecord, read_dataset, read_shards
from sharmill.shar.items import Item, open_items
from sharmill.shar.layout import CUTS


@dataclass(frozen=True)
class StoredCut:
    """A cut as it is stored.

    Attributes:
        shard: the index of its shard.
        number: its place in the shard, from 0.
        cut: its line among the cuts.
        items: what each other field has for it; a placeholder, without data, where a field has nothing.
    """

    shard: int
    number: int
    cut: dict[str, Any]
    items: dict[str, Item]


def find_shard(directory: Path, index: int) -> ShardRecord:
    """Return the index's record of a shard.

    Raises:
        ConfigError: there is no dataset, or no such shard in it.
        DamagedShard: the index is damaged.
    """
    num_shards = read_dataset(directory).num_shards
    for shard in read_shards(directory, num_shards):
        if shard.index == index:
            return shard
    raise ConfigError(f"{directory} has no shard {index}: its {num_shards} shards begin with 0", code="unknown_shard")


def find_cut(directory: Path, cut_id: str) -> StoredCut:
    """Return a cut of a dataset; the shards are searched one after the other, since the index has no ids.

    Raises:
        ConfigError: there is no dataset, or no such cut in it.
        DamagedShard: a file that is read is damaged.
    """
    # Most lines are of other cuts, and need not be decoded. Other tools escape what is not ASCII.
    needles = {json.dumps(cut_id, ensure_ascii=ascii)[1:-1].encode("utf-8", "surrogatepass") for ascii in (True, False)}
    for shard in read_shards(directory, read_dataset(directory).num_shards):
        path = _file(directory, shard, CUTS)
        for number, line in enumerate(read_lines(path)):
            if any(needle in line for needle in needles):
                cut = decode_cut(path, line)
                if cut.get("id") == cut_id:
                    return StoredCut(shard.index, number, cut, _read_items(directory, shard, number, cut_id))
    raise ConfigError(
        f"{directory} has no cut {cut_id!r}: sharmill inspect {directory} --shard 0 lists those of a shard",
        code="unknown_cut",
    )


def read_stored_cut(directory: Path, shard: ShardRecord, number: int) -> StoredCut:
    """Return the cut at a place of a shard.

    Raises:
        DamagedShard: there is none, or a file that is read is damaged.
    """
    path = _file(directory, shard, CUTS)
    lines = read_lines(path)
    if number >= len(lines):
        raise DamagedShard(f"{path} has {len(lines)} cuts, and no number {number}")
    cut = decode_cut(path, lines[number])
    return StoredCut(shard.index, number, cut, _read_items(directory, shard, number, str(cut.get("id"))))


def read_shard(directory: Path, shard: ShardRecord) -> Iterator[dict[str, Any]]:
    """Yield the cuts of a shard.

    Raises:
        DamagedShard: the file is damaged.
    """
    path = _file(directory, shard, CUTS)
    return (decode_cut(path, line) for line in read_lines(path))


def _read_items(directory: Path, shard: ShardRecord, number: int, cut_id: str) -> dict[str, Item]:
    items = {}
    for field in shard.fields:
        path = _file(directory, shard, field)
        if field == CUTS:
            continue
        with closing(open_items(path)) as table:
            if number >= len(table):
                raise table.damage(f"there are {len(table)} items, and none for {cut_id!r}, which is number {number}")
            item = table.item(number)
            if item.cut_id != cut_id:
                raise table.damage(f"item {number} is that of {item.cut_id!r}, not of {cut_id!r}")
            items[field] = item
    return items


def _file(directory: Path, shard: ShardRecord, field: str) -> Path:
    if field not in shard.fields:
        raise DamagedShard(f"{directory}: the index names no {field} of shard {shard.index}")
    return directory / shard.fields[field].file


def first_supervision(cut: dict[str, Any]) -> dict[str, Any]:
    """Return the first supervision of a cut, which may be damaged, empty where there is none."""
    supervisions = cut.get("supervisions")
    return as_mapping(supervisions[0]) if isinstance(supervisions, list) and supervisions else {}


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a mapping as it is, and an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def read_codes(item: Item) -> np.ndarray:
    """Return the codes of an item, (codebooks, frames).

    Raises:
        DamagedShard: they are not codes.
    """
    assert item.data is not None
    codes = array_from_bytes(item.data, item.cut_id)
    if codes.ndim != 2 or codes.dtype.kind not in "iu":
        raise DamagedShard(f"{item.cut_id}: an array of shape {codes.shape} and type {codes.dtype} is no codes")
    return codes


def read_stored_audio(item: Item) -> tuple[np.ndarray, int]:
    """Return the samples (samples,) of an item of audio, and their rate.

    Raises:
        RejectRecord: it cannot be decoded.
    """
    assert item.data is not None
    return decode_bytes(item.data)
