"""The files of one shard: cuts as compressed JSON lines, other fields as tar archives of data and metadata pairs."""

from __future__ import annotations

import gzip
import io
import math
import tokenize
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sharmill.errors import DamagedShard
from sharmill.shar.tar import TarWriter, open_field, read_tar

_encoder = msgspec.json.Encoder()
# What both kinds of line are: a JSON object.
_decoder = msgspec.json.Decoder(dict[str, Any])
# msgspec raises RecursionError for JSON that is nested too deeply.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

# What the cuts of one shard may unfold to. Without a limit a megabyte of gzip could be a gigabyte of lines.
_MAX_CUTS_BYTES = 1 << 28

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


def write_cuts(path: Path, cuts: Iterable[dict[str, Any]]) -> None:
    """Writes cuts as ``.jsonl.gz``, without time or name in the gzip header."""
    with path.open("wb") as stream, gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as lines:
        for cut in cuts:
            lines.write(_encoder.encode(cut) + b"\n")


def read_cuts(path: Path) -> Iterator[dict[str, Any]]:
    """The cuts of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: it is not there, cut off, or not JSON lines.
    """
    for line in read_lines(path):
        yield decode_cut(path, line)


def decode_cut(path: Path, line: bytes) -> dict[str, Any]:
    """One of the ``read_lines`` of a file of cuts.

    Raises:
        DamagedShard: it is not JSON.
    """
    try:
        return _decoder.decode(line)
    except NOT_JSON as error:
        raise DamagedShard(f"{path}: {error}") from error


def read_lines(path: Path) -> list[bytes]:
    """The lines of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: it is not there or cut off.
    """
    with open_field(path) as stream:
        data = stream.read()
    if path.suffix == ".gz":
        if not data:
            # gzip takes no bytes at all for an empty file.
            raise DamagedShard(f"{path}: the file has no bytes")
        data = decompress(path, data)
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def decompress(path: Path, data: bytes) -> bytes:
    """What the bytes of a gzip file of cuts unfold to.

    Raises:
        DamagedShard: they are cut off or damaged, or unfold to more than a shard can have.
    """
    unfolded = b""
    while data:
        member = zlib.decompressobj(wbits=31)
        try:
            unfolded += member.decompress(data, _MAX_CUTS_BYTES + 1 - len(unfolded))
        except zlib.error as error:
            raise DamagedShard(f"{path}: {error}") from error
        if len(unfolded) > _MAX_CUTS_BYTES:
            raise DamagedShard(f"{path}: the cuts of a shard are not more than {_MAX_CUTS_BYTES >> 20} MiB")
        if not member.eof:
            raise DamagedShard(f"{path}: the file ends within its compressed data; it is cut off")
        data = member.unused_data.lstrip(b"\0")  # gzip files may be filled up with zeros
    return unfolded


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


def array_to_bytes(array: np.ndarray) -> bytes:
    """An array as an ``.npy`` file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def array_from_bytes(data: bytes, where: str) -> np.ndarray:
    """The array of an ``.npy`` file; pickled objects are refused.

    Not by ``np.load``, which also takes archives of arrays, ignores what follows the array, and reserves whatever
    memory a header asks for.

    Raises:
        DamagedShard: it is not one; ``where`` says what in the message.
    """
    dtype, shape, column_major, start = array_layout(data, where)
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if column_major else "C")


def array_layout(data: bytes, where: str) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    """Type, shape, whether columns come first, and where the numbers begin in an ``.npy`` file; they are all there.

    Raises:
        DamagedShard: as ``array_from_bytes``.
    """
    try:
        # Most arrays of a dataset share a few headers, and numpy parses one as Python.
        dtype, shape, _, start = layout = _parse_header(data[: _header_end(data)])
        size = len(data) - start
        if size != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{size} bytes are not an array of shape {shape} and type {dtype}")
        return layout
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:  # numpy parses a header as Python
        raise DamagedShard(f"{where}: {error}") from error


def _header_end(data: bytes) -> int:
    if data[6:7] == b"\1":
        return 10 + int.from_bytes(data[8:10], "little")
    return 12 + int.from_bytes(data[8:12], "little")


@lru_cache(maxsize=4096)
def _parse_header(header: bytes) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    """Type, shape, whether columns come first, and where the numbers begin."""
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    if version not in _READ_HEADER:
        raise ValueError(f"arrays of version {version} are not read")
    shape, column_major, dtype = _READ_HEADER[version](stream)
    if dtype.hasobject:
        raise ValueError("the array has pickled objects")
    if min(shape, default=0) < 0 or not dtype.itemsize:
        raise ValueError(f"there is no array of shape {shape} and type {dtype}")
    return dtype, shape, column_major, stream.tell()
