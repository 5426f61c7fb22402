"""Ways to damage a finished dataset: its bytes, archives, compressed lines, items, cuts and index.

What is called with a dataset directory and damages it is a ``Damage``; the functions here return one. None of them
touches the index unless its name says so, so that the caller decides whether the index is that of the whole files
(a disk, a copy: checksums tell) or that of the damaged ones (a faulty writer: only their content tells).
"""

import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import soundfile as sf

from sharmill.errors import DamagedShard
from sharmill.shar.arrays import array_from_bytes, array_to_bytes
from sharmill.shar.items import FieldWriter, Item, read_field
from sharmill.shar.json_lines import read_cuts
from support.project import lines, reindex, write_lines

Damage = Callable[[Path], object]
CUTS = "cuts/cuts.000001.jsonl.gz"
TARGETS = "target_audio/recording.000001.tar"
CONTEXTS = "context_audio/recording.000001.tar"
CODES = "codes_toy/target_codes/codes.000001.tar"
CONTEXT_CODES = "codes_toy/context_codes/codes.000001.tar"
FILES = (CUTS, TARGETS, CONTEXTS, CODES, CONTEXT_CODES)
_BLOCK = 512
DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
# Things in the place of a file that is read as JSON, each made by a function of its path.
STRANGE_FILES: dict[str, Callable[[Path], object]] = {
    "JSON of 100,000 levels": lambda path: path.write_bytes(DEEP + b"\n"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\n"),
    "a list": lambda path: path.write_bytes(b"[]\n"),
    "a terabyte of nothing": lambda path: os.truncate(path, 1 << 40),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a loop of links": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "a link": lambda path: (path.rename(path.with_name("other")), path.symlink_to("other")),
}


@dataclass(frozen=True)
class Kind:
    """A kind of damage.

    ``codes`` are those of all findings that it makes, in one string, where the index is that of the damaged files; none
    where only the index can tell. ``level`` is the first at which they are found.
    """

    do: Damage
    codes: str
    level: str = "default"


def damaging(function: Callable[..., object]) -> Callable[..., Damage]:
    """Turns a function of a dataset and further arguments into one of these arguments that returns a ``Damage``."""
    return lambda *arguments, **options: lambda dataset: function(dataset, *arguments, **options)


@damaging
def all_of(dataset: Path, *damages: Damage) -> None:
    """Apply several kinds of damage in order."""
    for each in damages:
        each(dataset)


@damaging
def replace_by(dataset: Path, name: str, make: Callable[[Path], object]) -> None:
    """Puts what ``make`` makes in the place of a file."""
    (dataset / name).unlink()
    make(dataset / name)


@damaging
def exchange(dataset: Path, first: str, second: str) -> None:
    """Two files under each other's names."""
    kept = (dataset / first).read_bytes()
    shutil.copyfile(dataset / second, dataset / first)
    (dataset / second).write_bytes(kept)


@damaging
def leave(dataset: Path, name: str) -> None:
    """Leaves a file that does not belong there."""
    (dataset / name).parent.mkdir(parents=True, exist_ok=True)
    (dataset / name).write_bytes(b"x")


@damaging
def remove_files(dataset: Path, *names: str) -> None:
    for name in names:
        (dataset / name).unlink()


@damaging
def take_files(dataset: Path, *names: str, other: str = "foreign") -> None:
    """Replace a file, or the files of a field, by files of another dataset beside this one."""
    for name in names:
        for path in [dataset / name] if (dataset / name).is_file() else (dataset / name).iterdir():
            shutil.copyfile(dataset.with_name(other) / path.relative_to(dataset), path)


# Changes of a file's contents, given its name and a function of its bytes, members, items, lines or cuts.


@damaging
def _change(
    dataset: Path, read: Callable[[Path], Any], write: Callable[[Path, Any], object], name: str,
    change: Callable[[Any], Any],
) -> None:  # fmt: skip
    write(dataset / name, change(read(dataset / name)))


def places(archive: bytes) -> list[tarfile.TarInfo]:
    """The members of an archive, with ``offset``, ``offset_data`` and ``size``."""
    return tarfile.open(fileobj=io.BytesIO(archive)).getmembers()


def _read_members(path: Path) -> list[bytes]:
    """Members as their headers, data and padding."""
    archive = path.read_bytes()
    begins = [place.offset for place in places(archive)]
    return [archive[begin:end] for begin, end in pairwise([*begins, len(archive) - 2 * _BLOCK])]


def _write_items(path: Path, items: list[Item]) -> None:
    with FieldWriter(path) as writer:
        for item in items:
            writer.add(item)


def _read_lines(path: Path) -> list[bytes]:
    return gzip.decompress(path.read_bytes()).splitlines(keepends=True)


change_bytes = partial(_change, Path.read_bytes, Path.write_bytes)
change_members = partial(
    _change, _read_members, lambda path, members: path.write_bytes(b"".join(members) + bytes(2 * _BLOCK))
)
change_items = partial(_change, lambda path: list(read_field(path)), _write_items)
change_lines = partial(
    _change, _read_lines, lambda path, rows: path.write_bytes(gzip.compress(b"".join(rows), mtime=0))
)
change_cuts = partial(_change, lines, write_lines)
change_shards = partial(change_cuts, "shards.jsonl")


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


def _at(number: int, change: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    """A change of one row."""
    return lambda rows: [change(row) if place == number else row for place, row in enumerate(rows)]


def _changed(old: Callable[[str], Any], keys: dict[str, Any]) -> dict[str, Any]:
    """New values of keys, or functions of the old values."""
    return {key: value(old(key)) if callable(value) else value for key, value in keys.items()}


def _merge(old: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping with changed keys; keys set to ``...`` are removed."""
    return {key: value for key, value in {**old, **_changed(old.get, keys)}.items() if value is not ...}


def change_header(name: str, number: int, /, **fields: Any) -> Damage:
    """Changes the header of a member and makes its checksum right again."""

    def changed(member: bytes) -> bytes:
        info = tarfile.TarInfo.frombuf(member[:_BLOCK], "utf-8", "strict")
        for key, value in _changed(partial(getattr, info), fields).items():
            setattr(info, key, value)
        return info.tobuf(tarfile.GNU_FORMAT) + member[_BLOCK:]

    return change_members(name, _at(number, changed))


def change_item(name: str, number: int = 0, /, **fields: Any) -> Damage:
    """Change fields of one item, each to a value or by a function of the old value."""
    return change_items(name, _at(number, lambda item: replace(item, **_changed(partial(getattr, item), fields))))


def change_metadata(name: str, number: int = 0, /, **keys: Any) -> Damage:
    """Changes keys of an item's metadata; a key to ``...`` is removed."""
    return change_item(name, number, metadata=lambda old: _merge(old, keys))


def change_audio(name: str, change: Callable[[np.ndarray], np.ndarray], **options: Any) -> Damage:
    """Encodes changed samples in the first item's place, at the same rate unless one is given; the metadata stays."""

    def changed(data: bytes) -> bytes:
        samples, rate = sf.read(io.BytesIO(data), dtype="float32")
        stream = io.BytesIO()
        sf.write(stream, change(samples), options.get("rate", rate), format=options.get("format", "FLAC"))
        return stream.getvalue()

    return change_item(name, data=changed)


def change_codes(name: str, change: Callable[[np.ndarray], np.ndarray], *, describe: bool = False) -> Damage:
    """Changes the codes of a field's first item; with ``describe``, the shape in the metadata as well."""

    def changed(old: Item) -> Item:
        array, metadata = change(array_from_bytes(old.data, "codes").copy()), json.loads(json.dumps(old.metadata))
        if describe:
            (metadata.get("array") or metadata)["shape"] = list(array.shape)
        return replace(old, data=array_to_bytes(array), metadata=metadata)

    return change_items(name, _at(0, changed))


def swap_items(items: list[Item]) -> list[Item]:
    return [items[1], items[0], *items[2:]]


def swap_contents(items: list[Item]) -> list[Item]:
    """The names stay, data and metadata change places."""
    first, second = items[:2]
    return [replace(second, cut_id=first.cut_id), replace(first, cut_id=second.cut_id), *items[2:]]


def swap_data(items: list[Item]) -> list[Item]:
    """Names and metadata stay, the data change places."""
    first, second = items[:2]
    return [replace(first, data=second.data), replace(second, data=first.data), *items[2:]]


def change_cut(name: str, /, **keys: Any) -> Damage:
    """Change keys of the first cut; keys set to ``...`` are removed, and functions get the old value."""
    return change_cuts(name, _at(0, lambda cut: _merge(cut, keys)))


def change_supervision(name: str, /, **keys: Any) -> Damage:
    return change_cut(name, supervisions=lambda supervisions: [_merge(supervisions[0], keys)])


def change_custom(name: str, number: int = 0, /, **keys: Any) -> Damage:
    """Change custom keys of a cut's supervision."""

    def changed(cut: dict[str, Any]) -> dict[str, Any]:
        (supervision,) = cut["supervisions"]
        return cut | {"supervisions": [supervision | {"custom": _merge(supervision["custom"], keys)}]}

    return change_cuts(name, _at(number, changed))


# Index


def change_shard(number: int, **keys: Any) -> Damage:
    return change_shards(_at(number, lambda shard: _merge(shard, keys)))


def change_file(number: int, field: str, **keys: Any) -> Damage:
    """Changes what ``shards.jsonl`` says of one file."""
    return change_shard(number, fields=lambda fields: fields | {field: _merge(fields[field], keys)})


def change_description(**keys: Any) -> Damage:
    """Changes keys of ``dataset.json``."""
    return change_bytes("dataset.json", lambda data: msgspec.json.encode(_merge(msgspec.json.decode(data), keys)))


def change_codec(**facts: Any) -> Damage:
    """Changes what ``dataset.json`` says of its codec."""
    return change_description(codecs=lambda codecs: [_merge(codecs[0], facts)])


def index_as_written(dataset: Path) -> None:
    """The index that a writer of the files as they are would have left: sizes, checksums, counts, seconds, totals.

    What cannot be read keeps what the index says of it.
    """
    reindex(dataset)
    shards = lines(dataset / "shards.jsonl")
    for shard in shards:
        for key, field, read, measure in (
            ("count", "cuts", read_cuts, len),
            ("target_seconds", "target_audio", read_field, _seconds),
            ("context_seconds", "context_audio", read_field, _seconds),
        ):
            path = dataset / shard["fields"][field]["file"]
            with suppress(DamagedShard, KeyError, TypeError):
                shard[key] = measure(list(read(path))) if path.is_file() else shard[key]
    write_lines(dataset / "shards.jsonl", shards)
    totals = {key: round(sum(shard[key] for shard in shards), 3) for key in ("target_seconds", "context_seconds")}
    totals |= {"num_shards": len(shards), "num_cuts": sum(shard["count"] for shard in shards)}
    change_description(**totals)(dataset)


def _seconds(items: list[Item]) -> float:
    return round(sum(item.metadata["duration"] for item in items if item.metadata), 3)
