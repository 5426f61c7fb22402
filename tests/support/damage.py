"""Ways to damage a finished dataset: its bytes, archives, compressed lines, items, cuts and index.

What is called with a dataset directory and damages it is a ``Damage``; most functions here return one. None of them
touches the index unless its name says so, so that the caller decides whether the index is that of the whole files
(a disk, a copy: checksums tell) or that of the damaged ones (a faulty writer: only their content tells).
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import soundfile as sf

from sharmill.errors import DamagedShard
from sharmill.shar.arrays import array_from_bytes, array_to_bytes
from sharmill.shar.cut_lines import read_cuts
from sharmill.shar.items import FieldWriter, Item, read_field
from support.shar import lines, reindex, rewrite

Damage = Callable[[Path], object]
CUTS = "cuts/cuts.000001.jsonl.gz"
TARGETS = "target_audio/recording.000001.tar"
CONTEXTS = "context_audio/recording.000001.tar"
CODES = "codes_toy/target_codes/codes.000001.tar"
CONTEXT_CODES = "codes_toy/context_codes/codes.000001.tar"
FILES = (CUTS, TARGETS, CONTEXTS, CODES, CONTEXT_CODES)
_BLOCK = 512


@dataclass(frozen=True)
class Kind:
    """A kind of damage.

    ``codes`` are those of all findings that it makes, in one string, where the index is that of the damaged files; none
    where only the index can tell. ``level`` is the first at which they are found.
    """

    do: Damage
    codes: str
    level: str = "default"


def all_of(*damages: Damage) -> Damage:
    """One after the other."""

    def damage(dataset: Path) -> None:
        for each in damages:
            each(dataset)

    return damage


def index_as_written(dataset: Path) -> None:
    """The index that a writer of the files as they are would have left: sizes, checksums, counts, seconds, totals.

    What cannot be read keeps what the index says of it.
    """
    reindex(dataset)
    shards = lines(dataset / "shards.jsonl")
    for shard in shards:
        shard["count"] = _measure(dataset, shard, "cuts", read_cuts, len, shard["count"])
        for key, field in (("target_seconds", "target_audio"), ("context_seconds", "context_audio")):
            shard[key] = _measure(dataset, shard, field, read_field, _seconds, shard[key])
    rewrite(dataset / "shards.jsonl", shards)
    totals = {key: round(sum(shard[key] for shard in shards), 3) for key in ("target_seconds", "context_seconds")}
    totals |= {"num_shards": len(shards), "num_cuts": sum(shard["count"] for shard in shards)}
    change_description(**totals)(dataset)


def _measure(dataset: Path, shard: dict[str, Any], field: str, read: Any, measure: Any, recorded: Any) -> Any:
    path = dataset / shard["fields"][field]["file"]
    try:
        return measure(list(read(path))) if path.is_file() else recorded
    except (DamagedShard, KeyError, TypeError):
        return recorded


def _seconds(items: list[Item]) -> float:
    return round(sum(item.metadata["duration"] for item in items if item.metadata), 3)


# Bytes


def change_bytes(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(dataset: Path) -> None:
        path = dataset / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def flip_bit(name: str, at: int | Callable[[bytes], int]) -> Damage:
    """Flips the lowest bit of the byte at a position (negative: from the end), or at that which ``at`` finds."""

    def flipped(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at if isinstance(at, int) else at(data)] ^= 1
        return bytes(changed)

    return change_bytes(name, flipped)


def zero_from(name: str, at: Callable[[bytes], int]) -> Damage:
    """Zeros to the end, as blocks are that a file system never got."""
    return change_bytes(name, lambda data: data[: at(data)] + bytes(len(data) - at(data)))


def replace_by(name: str, make: Callable[[Path], object]) -> Damage:
    """Puts what ``make`` makes in the place of a file."""

    def damage(dataset: Path) -> None:
        (dataset / name).unlink()
        make(dataset / name)

    return damage


def exchange(first: str, second: str) -> Damage:
    """Two files under each other's names."""

    def damage(dataset: Path) -> None:
        kept = (dataset / first).read_bytes()
        (dataset / first).write_bytes((dataset / second).read_bytes())
        (dataset / second).write_bytes(kept)

    return damage


def leave(name: str, content: bytes = b"x") -> Damage:
    """Leaves a file that does not belong there."""

    def damage(dataset: Path) -> None:
        (dataset / name).parent.mkdir(parents=True, exist_ok=True)
        (dataset / name).write_bytes(content)

    return damage


@dataclass(frozen=True)
class Place:
    """Where a member of an archive lies: its header, its ``size`` bytes of data, and the end of their padding."""

    header: int
    size: int

    @property
    def data(self) -> int:
        return self.header + _BLOCK

    @property
    def data_end(self) -> int:
        return self.data + self.size

    @property
    def end(self) -> int:
        return self.data_end + -self.size % _BLOCK


def places(archive: bytes) -> list[Place]:
    """The places of all members."""
    found = []
    position = 0
    while archive[position] != 0:
        found.append(Place(position, int(archive[position + 124 : position + 135], 8)))
        position = found[-1].end
    return found


def change_header(name: str, number: int, /, **fields: Any) -> Damage:
    """Changes the header of a member and makes its checksum right again."""

    def changed(archive: bytes) -> bytes:
        header = places(archive)[number].header
        info = tarfile.TarInfo.frombuf(archive[header : header + _BLOCK], "utf-8", "strict")
        for key, value in fields.items():
            setattr(info, key, value)
        block = info.tobuf(tarfile.GNU_FORMAT)
        assert len(block) == _BLOCK
        return archive[:header] + block + archive[header + _BLOCK :]

    return change_bytes(name, changed)


def change_size(name: str, number: int, by: int) -> Damage:
    """A header that tells another size than its member has, with a right checksum."""

    def damage(dataset: Path) -> None:
        size = places((dataset / name).read_bytes())[number].size
        change_header(name, number, size=size + by)(dataset)

    return damage


def change_members(name: str, change: Callable[[list[bytes]], list[bytes]]) -> Damage:
    """Changes the list of members, each as its header, data and padding."""

    def changed(archive: bytes) -> bytes:
        members = [archive[place.header : place.end] for place in places(archive)]
        return b"".join(change(members)) + bytes(2 * _BLOCK)

    return change_bytes(name, changed)


# Items


def change_items(name: str, change: Callable[[list[Item]], list[Item]]) -> Damage:
    def damage(dataset: Path) -> None:
        items = list(read_field(dataset / name))
        with FieldWriter(dataset / name) as writer:
            for item in change(items):
                writer.add(item)

    return damage


def change_item(name: str, number: int = 0, /, **fields: Any) -> Damage:
    """Changes fields of one item, each by a value, or a function of what it was."""

    def changed(items: list[Item]) -> list[Item]:
        old = items[number]
        values = {key: getattr(old, key) for key in ("cut_id", "extension", "data", "metadata")}
        values |= {key: value(values[key]) if callable(value) else value for key, value in fields.items()}
        return [*items[:number], Item(**values), *items[number + 1 :]]

    return change_items(name, changed)


def change_metadata(name: str, number: int = 0, /, **keys: Any) -> Damage:
    """Changes keys of an item's metadata; a key to ``...`` is removed."""
    return change_item(name, number, metadata=lambda old: _merge(old, keys))


def change_audio(name: str, change: Callable[[np.ndarray], np.ndarray], number: int = 0, **options: Any) -> Damage:
    """Encodes changed samples in an item's place, at the same rate unless ``rate`` is given; the metadata stays."""

    def changed(data: bytes) -> bytes:
        samples, rate = sf.read(io.BytesIO(data), dtype="float32")
        stream = io.BytesIO()
        sf.write(stream, change(samples), options.get("rate", rate), format=options.get("format", "FLAC"))
        return stream.getvalue()

    return change_item(name, number, data=changed)


def change_codes(name: str, change: Callable[[np.ndarray], np.ndarray], *, describe: bool = False) -> Damage:
    """Changes the codes of a field's first item; with ``describe``, the shape in the metadata as well."""

    def changed(items: list[Item]) -> list[Item]:
        old = items[0]
        array = change(array_from_bytes(old.data, "codes").copy())
        metadata = json.loads(json.dumps(old.metadata))
        if describe:
            (metadata.get("array") or metadata)["shape"] = list(array.shape)
        return [Item(old.cut_id, old.extension, array_to_bytes(array), metadata), *items[1:]]

    return change_items(name, changed)


def swap_items(items: list[Item]) -> list[Item]:
    return [items[1], items[0], *items[2:]]


def swap_contents(items: list[Item]) -> list[Item]:
    """The names stay, data and metadata change places."""
    first, second = items[:2]
    return [
        Item(first.cut_id, second.extension, second.data, second.metadata),
        Item(second.cut_id, first.extension, first.data, first.metadata),
        *items[2:],
    ]


def swap_data(items: list[Item]) -> list[Item]:
    """Names and metadata stay, the data change places."""
    first, second = items[:2]
    return [
        Item(first.cut_id, first.extension, second.data, first.metadata),
        Item(second.cut_id, second.extension, first.data, second.metadata),
        *items[2:],
    ]


# Cuts


def change_lines(name: str, change: Callable[[list[bytes]], list[bytes]]) -> Damage:
    """Changes the lines of a compressed file, as bytes."""

    def changed(data: bytes) -> bytes:
        return gzip.compress(b"".join(change(gzip.decompress(data).splitlines(keepends=True))), mtime=0)

    return change_bytes(name, changed)


def change_cuts(name: str, change: Callable[[list[Any]], list[Any]]) -> Damage:
    def damage(dataset: Path) -> None:
        rewrite(dataset / name, change(lines(dataset / name)))

    return damage


def change_cut(name: str, /, **keys: Any) -> Damage:
    """Changes keys of the first cut; those to ``...`` are removed, and functions are called with what was there."""
    return change_cuts(name, lambda cuts: [_merge(cuts[0], keys), *cuts[1:]])


def change_supervision(name: str, /, **keys: Any) -> Damage:
    return change_cut(name, supervisions=lambda supervisions: [_merge(supervisions[0], keys)])


def merge_custom(cut: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A cut with changed keys of what its supervision has of the manifest and of the context."""
    (supervision,) = cut["supervisions"]
    return cut | {"supervisions": [supervision | {"custom": _merge(supervision["custom"], keys)}]}


def change_custom(name: str, /, **keys: Any) -> Damage:
    return change_cuts(name, lambda cuts: [merge_custom(cuts[0], **keys), *cuts[1:]])


def _merge(old: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    changed = {key: value(old[key]) if callable(value) else value for key, value in keys.items()}
    return {key: value for key, value in {**old, **changed}.items() if value is not ...}


# Index


def change_shards(change: Callable[[list[Any]], list[Any]]) -> Damage:
    """Changes the records of ``shards.jsonl``."""

    def damage(dataset: Path) -> None:
        rewrite(dataset / "shards.jsonl", change(lines(dataset / "shards.jsonl")))

    return damage


def change_shard(number: int, **keys: Any) -> Damage:
    return change_shards(lambda shards: [*shards[:number], _merge(shards[number], keys), *shards[number + 1 :]])


def change_file(number: int, field: str, **keys: Any) -> Damage:
    """Changes what ``shards.jsonl`` says of one file."""
    return change_shard(number, fields=lambda fields: fields | {field: _merge(fields[field], keys)})


def change_description(**keys: Any) -> Damage:
    """Changes keys of ``dataset.json``."""

    def damage(dataset: Path) -> None:
        path = dataset / "dataset.json"
        path.write_bytes(msgspec.json.encode(_merge(msgspec.json.decode(path.read_bytes()), keys)))

    return damage


def change_codec(**facts: Any) -> Damage:
    """Changes what ``dataset.json`` says of its codec."""
    return change_description(codecs=lambda codecs: [_merge(codecs[0], facts)])


# Datasets


def take_files(*folders: str, other: str = "foreign") -> Damage:
    """The files of fields become those of another dataset beside this one."""

    def damage(dataset: Path) -> None:
        for folder in folders:
            for path in sorted((dataset / folder).iterdir()):
                shutil.copyfile(dataset.with_name(other) / folder / path.name, path)

    return damage


def take_index(other: str = "again") -> Damage:
    """``shards.jsonl`` becomes that of another dataset beside this one."""
    return lambda dataset: shutil.copyfile(dataset.with_name(other) / "shards.jsonl", dataset / "shards.jsonl")


def remove_files(*names: str) -> Damage:
    def damage(dataset: Path) -> None:
        for name in names:
            (dataset / name).unlink()

    return damage
