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

# The maximum size of the file of cuts of a shard, both compressed and uncompressed. Without a limit, a megabyte of gzip
# could expand to a gigabyte of lines, and a sparse file could have any size.
_MAX_CUTS_BYTES: Final = 1 << 28

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, Any])


class _Identified(msgspec.Struct):
    id: str


_id_decoder = msgspec.json.Decoder(_Identified)


def write_cuts(path: Path, cuts: Iterable[dict[str, Any]]) -> None:
    """Write cuts as ``.jsonl.gz``; the gzip header contains neither time nor name, so equal cuts give equal bytes."""
    write_cut_lines(path, map(_encoder.encode, cuts))


def write_cut_lines(path: Path, cuts: Iterable[bytes]) -> None:
    """Write cuts given as JSON without line ends, in the format of ``write_cuts``."""
    with open_new(path) as stream, gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as lines:
        lines.writelines(cut + b"\n" for cut in cuts)


def write_values(path: Path, attribute: str, values: Iterable[tuple[str, Any]]) -> None:
    """Write the values of a field, given as pairs of cut id and value, in the format of lhotse's JsonlShardWriter.

    A cut whose value is None gets a line without a value.
    """
    write_cuts(path, ({"cut_id": cut_id} | ({} if value is None else {attribute: value}) for cut_id, value in values))


def read_cuts(path: Location) -> Iterator[dict[str, Any]]:
    """Yield the cuts of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: the file is missing, cut off, or not JSON lines.
    """
    for line in read_json_lines(path):
        yield decode_line(path, line, _decoder)


def read_cut_ids(path: Location) -> Iterator[str]:
    """Yield the ids of the cuts of a file.

    Raises:
        DamagedShard: the file is missing, cut off, or not JSON lines with ids.
    """
    for line in read_json_lines(path):
        yield decode_line(path, line, _id_decoder).id


def decode_cut(path: Location, line: bytes) -> dict[str, Any]:
    """Decode a cut from one line of a file of cuts; raises the same error as ``decode_line``."""
    return decode_line(path, line, _decoder)


def decode_line(path: Location, line: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode one line of a file of cuts.

    Raises:
        DamagedShard: the line is not JSON, or not of the decoder's type.
    """
    try:
        return decoder.decode(line)
    except NOT_JSON as error:
        raise DamagedShard(f"{path}: {error}") from error


def read_json_lines(path: Location) -> list[bytes]:
    """Return the lines of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: the file is missing or cut off.
    """
    lines, damage = salvage_lines(path)
    if damage:
        raise damage
    return lines


def salvage_lines(path: Location) -> tuple[list[bytes], DamagedShard | None]:
    """Return the lines of a ``.jsonl.gz`` or ``.jsonl`` file, and an error that describes its damage, or None.

    If the file is damaged, the lines before the damage are returned; if it is missing, no lines.
    """
    try:
        with open_field(path) as stream:
            # Limit the request to the file's size: allocating the maximum takes longer than reading a small file.
            data = stream.read(min(os.fstat(stream.fileno()).st_size, _MAX_CUTS_BYTES) + 1)
    except DamagedShard as error:
        return [], error
    # Do not decompress a file that already exceeds the limit.
    problem = None
    if path.name.endswith(".gz") and len(data) <= _MAX_CUTS_BYTES:
        data, problem = _unpack(data)
    if len(data) > _MAX_CUTS_BYTES:
        # Drop the content: its lines are not needed, and splitting them would double the memory.
        data, problem = b"", f"the cuts of a shard must not exceed {_MAX_CUTS_BYTES >> 20} MiB"
    lines = data.split(b"\n")
    # Drop the last line if it is empty or was cut off by the damage.
    if problem or not lines[-1]:
        lines.pop()
    return lines, DamagedShard(f"{path}: {problem}") if problem else None


def _unpack(data: bytes) -> tuple[bytes, str | None]:
    """Decompress gzip data until it exceeds the size limit; return the content, and a description of damage or None."""
    blocks: list[bytes] = []
    begin, size, problem = 0, 0, None if data else "the file is empty; it is cut off"
    try:
        while begin < len(data) and size <= _MAX_CUTS_BYTES:
            # Use zlib directly: gzip's own reader would make reading a small shard 5 % slower.
            member = zlib.decompressobj(wbits=31)
            while begin < len(data) and not member.eof and size <= _MAX_CUTS_BYTES:
                part = data[begin : begin + (1 << 18)]
                blocks.append(member.decompress(part, 1 << 18))
                size += len(blocks[-1])
                begin += len(part) - len(member.unused_data) - len(member.unconsumed_tail)
            if not member.eof:
                problem = "it is cut off within its compressed data"
            # gzip files may be padded with zeros.
            begin = len(data) - len(data[begin:].lstrip(b"\0"))
    except zlib.error as error:
        problem = f"it is cut off or damaged: {error}"
    return b"".join(blocks), problem
