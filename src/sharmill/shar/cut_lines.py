"""The files of cuts: JSON lines, compressed or not. Fields of lhotse that are JSON lines too are read by them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from sharmill.errors import DamagedShard
from sharmill.shar.tar import open_field

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, Any])
# msgspec raises RecursionError for JSON that is nested too deeply.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# What the cuts of one shard may unfold to. Without a limit a megabyte of gzip could be a gigabyte of lines.
_MAX_CUTS_BYTES = 1 << 28


class _Identified(msgspec.Struct):
    id: str


_id_decoder = msgspec.json.Decoder(_Identified)


def write_cuts(path: Path, cuts: Iterable[dict[str, Any]]) -> None:
    """Write cuts as ``.jsonl.gz``, without time or name in the gzip header."""
    write_cut_lines(path, map(_encoder.encode, cuts))


def write_cut_lines(path: Path, cuts: Iterable[bytes]) -> None:
    """Write cuts, each as JSON without a line end, as ``write_cuts`` does."""
    with path.open("wb") as stream, gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as lines:
        for cut in cuts:
            lines.write(cut + b"\n")


def read_cuts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the cuts of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: it is not there, cut off, or not JSON lines.
    """
    for line in read_lines(path):
        yield decode_cut(path, line)


def read_cut_ids(path: Path) -> Iterator[str]:
    """Yield the ids of the cuts of a file.

    Raises:
        DamagedShard: it is not there, cut off, or not JSON lines with ids.
    """
    for line in read_lines(path):
        try:
            yield _id_decoder.decode(line).id
        except NOT_JSON as error:
            raise DamagedShard(f"{path}: {error}") from error


def decode_cut(path: Path, line: bytes) -> dict[str, Any]:
    """Return the cut that one line of a file of cuts has.

    Raises:
        DamagedShard: it is not JSON.
    """
    try:
        return _decoder.decode(line)
    except NOT_JSON as error:
        raise DamagedShard(f"{path}: {error}") from error


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: it is not there or cut off.
    """
    with open_field(path) as stream:
        return split_lines(path, stream.read())


def split_lines(path: Path, data: bytes) -> list[bytes]:
    """Return the lines of a ``.jsonl.gz`` or ``.jsonl`` file whose bytes are ``data``.

    Raises:
        DamagedShard: it is cut off.
    """
    if path.suffix == ".gz":
        if not data:
            # gzip takes no bytes at all for an empty file.
            raise DamagedShard(f"{path}: the file has no bytes")
        data = _decompress(path, data)
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _decompress(path: Path, data: bytes) -> bytes:
    """Return the content of a gzip file of cuts.

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
