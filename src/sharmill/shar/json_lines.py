"""Files of JSON lines, compressed or not: the cuts of a shard, and the values of a field."""

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from sharmill.errors import DamagedShard
from sharmill.files.atomic import open_new
from sharmill.files.location import Location
from sharmill.files.stored import NOT_JSON
from sharmill.shar.tar import open_field

# Bytes of the cuts of one shard, at most, packed and unpacked. Without a limit a megabyte of gzip could be a gigabyte
# of lines, and a sparse file any number of bytes.
_MAX_CUTS_BYTES: Final = 1 << 28

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, Any])


class _Identified(msgspec.Struct):
    id: str


_id_decoder = msgspec.json.Decoder(_Identified)


def write_cuts(path: Path, cuts: Iterable[dict[str, Any]]) -> None:
    """Write cuts as ``.jsonl.gz``, without time or name in the gzip header."""
    write_cut_lines(path, map(_encoder.encode, cuts))


def write_cut_lines(path: Path, cuts: Iterable[bytes]) -> None:
    """Write cuts, each as JSON without a line end, as ``write_cuts`` does."""
    with open_new(path) as stream, gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as lines:
        lines.writelines(cut + b"\n" for cut in cuts)


def write_values(path: Path, attribute: str, values: Iterable[tuple[str, Any]]) -> None:
    """Write the values of a field as lhotse's JsonlShardWriter does: from pairs of the id of a cut and its value.

    A cut whose value is None has a line without a value.
    """
    write_cuts(path, ({"cut_id": cut_id} | ({} if value is None else {attribute: value}) for cut_id, value in values))


def read_cuts(path: Location) -> Iterator[dict[str, Any]]:
    """Yield the cuts of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: it is not there, cut off, or not JSON lines.
    """
    for line in read_json_lines(path):
        yield decode_line(path, line, _decoder)


def read_cut_ids(path: Location) -> Iterator[str]:
    """Yield the ids of the cuts of a file.

    Raises:
        DamagedShard: it is not there, cut off, or not JSON lines with ids.
    """
    for line in read_json_lines(path):
        yield decode_line(path, line, _id_decoder).id


def decode_cut(path: Location, line: bytes) -> dict[str, Any]:
    """Return the cut that one line of a file of cuts has; raises as ``decode_line``."""
    return decode_line(path, line, _decoder)


def decode_line(path: Location, line: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return what a decoder makes of one line of a file of cuts.

    Raises:
        DamagedShard: it is not JSON, or not of the decoder's type.
    """
    try:
        return decoder.decode(line)
    except NOT_JSON as error:
        raise DamagedShard(f"{path}: {error}") from error


def read_json_lines(path: Location) -> list[bytes]:
    """Return the lines of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: it is not there or cut off.
    """
    lines, damage = salvage_lines(path)
    if damage:
        raise damage
    return lines


def salvage_lines(path: Location) -> tuple[list[bytes], DamagedShard | None]:
    """Return the lines of a ``.jsonl.gz`` or ``.jsonl`` file, and None.

    Of a damaged one the lines before the damage are returned, and the error; of one that is not there, the error alone.
    """
    try:
        with open_field(path) as stream:
            # Memory for all that there may be is not asked for, which takes longer than reading a small file.
            data = stream.read(min(os.fstat(stream.fileno()).st_size, _MAX_CUTS_BYTES) + 1)
    except DamagedShard as error:
        return [], error
    # A file that is too large itself is not unpacked.
    problem = None
    if path.name.endswith(".gz") and len(data) <= _MAX_CUTS_BYTES:
        data, problem = _unpack(data)
    if len(data) > _MAX_CUTS_BYTES:
        # No line of such a file is wanted, and splitting them would take as much memory again.
        data, problem = b"", f"the cuts of a shard are not more than {_MAX_CUTS_BYTES >> 20} MiB"
    lines = data.split(b"\n")
    # A line that the damage cuts off is none.
    if problem or not lines[-1]:
        lines.pop()
    return lines, DamagedShard(f"{path}: {problem}") if problem else None


def _unpack(data: bytes) -> tuple[bytes, str | None]:
    """Return the content of a gzip file, up to the first block beyond the limit, and what is wrong behind it, if so."""
    blocks: list[bytes] = []
    begin, size, problem = 0, 0, None if data else "the file is empty; it is cut off"
    try:
        while begin < len(data) and size <= _MAX_CUTS_BYTES:
            # By zlib itself: of a small shard, gzip's own reader would take a twentieth of the time to read it.
            member = zlib.decompressobj(wbits=31)
            while begin < len(data) and not member.eof and size <= _MAX_CUTS_BYTES:
                part = data[begin : begin + (1 << 18)]
                blocks.append(member.decompress(part, 1 << 18))
                size += len(blocks[-1])
                begin += len(part) - len(member.unused_data) - len(member.unconsumed_tail)
            if not member.eof:
                problem = "it is cut off within its compressed data"
            # gzip files may be filled up with zeros.
            begin = len(data) - len(data[begin:].lstrip(b"\0"))
    except zlib.error as error:
        problem = f"it is cut off or damaged: {error}"
    return b"".join(blocks), problem
