"""Files of JSON lines, compressed or not: those of cuts, and fields with a value for each cut."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sharmill.errors import DamagedShard
from sharmill.shar.tar import open_field

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, Any])
# msgspec raises RecursionError for JSON that is nested too deeply.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# What the cuts of one shard may have, and unfold to. Without a limit a megabyte of gzip could be a gigabyte of lines,
# and a sparse file any number of bytes.
_MAX_CUTS_BYTES = 1 << 28
# Read from gzip, and unfolded, at once.
_PART_BYTES = 1 << 18


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


def write_values(path: Path, attribute: str, values: Iterable[tuple[str, Any]]) -> None:
    """Write the values of a field as lhotse's JsonlShardWriter does: from pairs of the id of a cut and its value.

    A cut whose value is None has a line without a value.
    """
    write_cuts(path, ({"cut_id": cut_id} | ({} if value is None else {attribute: value}) for cut_id, value in values))


def read_cuts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the cuts of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: it is not there, cut off, or not JSON lines.
    """
    for line in read_lines(path):
        yield decode_line(path, line, _decoder)


def read_cut_ids(path: Path) -> Iterator[str]:
    """Yield the ids of the cuts of a file.

    Raises:
        DamagedShard: it is not there, cut off, or not JSON lines with ids.
    """
    for line in read_lines(path):
        yield decode_line(path, line, _id_decoder).id


def decode_cut(path: Path, line: bytes) -> dict[str, Any]:
    """Return the cut that one line of a file of cuts has; raises as ``decode_line``."""
    return decode_line(path, line, _decoder)


def decode_line(path: Path, line: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return what a decoder makes of one line of a file of cuts.

    Raises:
        DamagedShard: it is not JSON, or not of the decoder's type.
    """
    try:
        return decoder.decode(line)
    except NOT_JSON as error:
        raise DamagedShard(f"{path}: {error}") from error


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: it is not there or cut off.
    """
    lines, damage = salvage_lines(path)
    if damage:
        raise damage
    return lines


def salvage_lines(path: Path) -> tuple[list[bytes], DamagedShard | None]:
    """Return the lines of a ``.jsonl.gz`` or ``.jsonl`` file, and None; of a damaged one the lines before the damage.

    Raises:
        DamagedShard: it is not there.
    """
    data, damage = _unfold(path, _read(path))
    lines = data.split(b"\n")
    # A line that the damage cuts off is none.
    if damage or not lines[-1]:
        lines.pop()
    return lines, damage


def _read(path: Path) -> bytes:
    with open_field(path) as stream:
        # Memory for all that there may be is not asked for, which takes longer than reading a small file.
        size = os.fstat(stream.fileno()).st_size
        return stream.read(min(size, _MAX_CUTS_BYTES) + 1)


def _unfold(path: Path, data: bytes) -> tuple[bytes, DamagedShard | None]:
    """Return the content of a file of cuts, or what comes before a damage, and the damage."""
    too_large = DamagedShard(f"{path}: the cuts of a shard are not more than {_MAX_CUTS_BYTES >> 20} MiB")
    if len(data) > _MAX_CUTS_BYTES:
        return b"", too_large
    if path.suffix != ".gz":
        return data, None
    if not data:
        # gzip takes no bytes at all for an empty file.
        return b"", DamagedShard(f"{path}: the file has no bytes")
    unfolded: list[bytes] = []
    size = 0
    try:
        for part in _decompress(path, data):
            unfolded.append(part)
            size += len(part)
            if size > _MAX_CUTS_BYTES:
                # No line of such a file is wanted, and splitting them would take as much memory again.
                return b"", too_large
    except DamagedShard as error:
        return b"".join(unfolded), error
    return b"".join(unfolded), None


def _decompress(path: Path, data: bytes) -> Iterator[bytes]:
    """Yield the content of a gzip file of cuts, in parts.

    Raises:
        DamagedShard: they are cut off or damaged.
    """
    position = 0
    while position < len(data):
        member = zlib.decompressobj(wbits=31)
        while position < len(data) and not member.eof:
            part = data[position : position + _PART_BYTES]
            try:
                unfolded = member.decompress(part, _PART_BYTES)
            except zlib.error as error:
                raise DamagedShard(f"{path}: {error}") from error
            position += len(part) - len(member.unused_data) - len(member.unconsumed_tail)
            yield unfolded
        if not member.eof:
            raise DamagedShard(f"{path}: the file ends within its compressed data; it is cut off")
        # gzip files may be filled up with zeros.
        position = len(data) - len(data[position:].lstrip(b"\0"))
