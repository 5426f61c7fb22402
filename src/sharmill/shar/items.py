"""The content of a shard's files: cuts, the items of a field for them, arrays, and lhotse's manifests of all these.

Cuts are JSON lines, compressed or not, and so are the values of a field. In any other field each cut has a pair of
members of an archive: data and its lhotse manifest. Arrays are ``.npy`` files, which never have pickled objects.

By the index files that ``sharmill.shar.sidecars`` writes, any item is read by itself: opening a file reads nothing but
its index then, where otherwise all headers are gone through, and lines are unpacked as a whole.

Manifests are made as plain mappings, without lhotse's classes, which cost more than the rest of writing a cut; tests
read them with lhotse. A cut is a pure function of the record that it carries and of the length of its audio: the
checker makes it again.
"""

import gzip
import io
import math
import os
import re
import tokenize
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from sharmill.audio.resample import resampled_length
from sharmill.errors import ConfigError, DamagedShard
from sharmill.files.atomic import open_new
from sharmill.files.stored import NOT_JSON
from sharmill.manifest import (
    ALIGNMENT,
    ORIGINAL_TAG,
    TYPED_KEYS,
    Segment,
    Utterance,
    kept_id,
    nemo_language,
    parse_speaker_tag,
    recording_id,
    segment_id,
)
from sharmill.shar.layout import CONTEXT_UNALIGNED
from sharmill.shar.tar import END, TarDamage, load, open_field, walk, write_member

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, Any])

# What the cuts of one shard may have, and unfold to. Without a limit a megabyte of gzip could be a gigabyte of lines,
# and a sparse file any number of bytes.
_MAX_CUTS_BYTES: Final = 1 << 28


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


def read_cuts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the cuts of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: it is not there, cut off, or not JSON lines.
    """
    for line in read_json_lines(path):
        yield decode_line(path, line, _decoder)


def read_cut_ids(path: Path) -> Iterator[str]:
    """Yield the ids of the cuts of a file.

    Raises:
        DamagedShard: it is not there, cut off, or not JSON lines with ids.
    """
    for line in read_json_lines(path):
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


def read_json_lines(path: Path) -> list[bytes]:
    """Return the lines of a ``.jsonl.gz`` or ``.jsonl`` file.

    Raises:
        DamagedShard: it is not there or cut off.
    """
    lines, damage = salvage_lines(path)
    if damage:
        raise damage
    return lines


def salvage_lines(path: Path) -> tuple[list[bytes], DamagedShard | None]:
    """Return the lines of a ``.jsonl.gz`` or ``.jsonl`` file, and None.

    Of a damaged one the lines before the damage are returned, and the error; of one that is not there, the error alone.
    """
    try:
        with open_field(path) as stream:
            # Memory for all that there may be is not asked for, which takes longer than reading a small file.
            data = stream.read(min(os.fstat(stream.fileno()).st_size, _MAX_CUTS_BYTES) + 1)
    except DamagedShard as error:
        return [], error
    # Of a file that is too large itself, nothing is unpacked.
    problem = None
    if path.suffix == ".gz" and len(data) <= _MAX_CUTS_BYTES:
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


NO_DATA: Final = "nodata"
_NO_METADATA: Final = "nometa"
_OFFSET: Final = np.dtype("<u8")
# Eight million items.
_MAX_INDEX_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """The data of a cut in a field, in the format that ``extension`` names, and the lhotse manifest of it.

    Both are None for a placeholder, which says that the cut has nothing in this field. The item of a field of values
    has no data either: its metadata are the value by the attribute of the cut.
    """

    cut_id: str
    extension: str
    data: bytes | None
    metadata: dict[str, Any] | None


class FieldWriter(AbstractContextManager["FieldWriter"]):
    """Writer of one tar field of one shard. Only leaving the ``with`` block without an error completes the archive."""

    def __init__(self, path: Path) -> None:
        self._stream = open_new(path)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with self._stream:
            if kind is None:
                self._stream.write(END)

    def add(self, item: Item) -> None:
        """Append the pair of members of one cut: data first, its metadata next, as lhotse reads them."""
        if item.data is None:
            self._add(item.cut_id, NO_DATA, b"", b"")
        else:
            self._add(item.cut_id, item.extension, item.data, _encoder.encode(item.metadata) + b"\n")

    def copy(self, table: "ItemTable", number: int) -> None:
        """Append the pair of members of an item of another archive as they are.

        Raises:
            DamagedShard: the two do not belong together.
        """
        self._add(*table.raw(number))

    def _add(self, cut_id: str, extension: str, data: bytes, metadata: bytes) -> None:
        write_member(self._stream, f"{cut_id}.{extension}", data)
        write_member(self._stream, f"{cut_id}.{_NO_METADATA if extension == NO_DATA else 'json'}", metadata)


class ItemTable:
    """The items of a tar field, taken in any order. The archive stays open as long as the table is referred to.

    Args:
        path: of the archive.
        index: its index file: opening reads nothing else then, and headers are parsed of the items that are asked for.
        ids: of the cuts that the items must belong to.
        salvage: of a damaged archive, take the members before the damage.

    Attributes:
        names: of the members, in order; by an index, of the last item.
        headers: the positions of the first headers of these members.
        size: the number of bytes of the file.
        cut_off: with ``salvage``, what is wrong behind the last member; else None.

    Raises:
        DamagedShard: the archive is not there or damaged, or its items are not those of the cuts.
    """

    def __init__(
        self, path: Path, *, index: Path | None = None, ids: Sequence[str] | None = None, salvage: bool = False
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
        """Take the members between two positions into the lists; None is the end marker."""
        # Lists of what Python's garbage collector does not look at: a tuple for each member would double its work.
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
        """Return where in the lists the first member of an item is; by an index they have the members of this one."""
        if self._offsets is None:
            return 2 * number
        if number != self._item:
            self._item = -1
            begin, end = self._offsets[number : number + 2].tolist()
            self._parse(begin, None if end == self.size else end)
            self._item = number
        return 0

    def __len__(self) -> int:
        # An odd member counts as an item, so that it is not overlooked.
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
            raise self.damage(f"member {first!r} has no {expected!r} beside it")
        return cut_id, extension

    def raw(self, number: int) -> tuple[str, str, bytes, bytes]:
        """Return the cut id, the extension, the data and the metadata of an item; raises as ``pair``."""
        cut_id, extension = self.pair(number)
        first = self._find(number)
        return cut_id, extension, self.member(first), self.member(first + 1)

    def member(self, number: int) -> bytes:
        """Return the bytes of a member."""
        return self._content[self._starts[number] : self._ends[number]]

    def place(self, member: int) -> tuple[int, int]:
        """Return the position of the first byte of a member in the file, and its number of bytes."""
        return self._starts[member], self._ends[member] - self._starts[member]

    def item(self, number: int, *, copy: bool = True) -> Item:
        """Return an item; without ``copy`` its data is a view of the file.

        Raises:
            DamagedShard: its members do not belong together, or its metadata are not JSON.
        """
        cut_id, extension = self.pair(number)
        if extension == NO_DATA:
            return Item(cut_id, extension, None, None)
        first = self._find(number)
        try:
            metadata = _decoder.decode(self.member(first + 1))
        except NOT_JSON as error:
            raise self.damage(f"the metadata of '{cut_id}.{extension}' is not JSON: {error}") from error
        # A view serves as bytes.
        view: Any = memoryview(self._content)[self._starts[first] : self._ends[first]]
        return Item(cut_id, extension, bytes(view) if copy else view, metadata)

    def damage(self, what: str) -> DamagedShard:
        """Return the error that says what is wrong with this archive."""
        return DamagedShard(f"{self._path}: {what}")


def read_offsets(index: Path, path: Path, size: int) -> np.ndarray:
    """Return where each item of a file of ``size`` bytes begins, and its end, from its index file.

    Raises:
        DamagedShard: the index is not there, or is that of another file.
    """
    with open_field(index) as stream:
        content = stream.read(_MAX_INDEX_BYTES + 1)
    if len(content) > _MAX_INDEX_BYTES:
        raise DamagedShard(f"{index} has more than {_MAX_INDEX_BYTES >> 20} MiB: it is not the index of a shard")
    offsets = np.frombuffer(content[: len(content) // _OFFSET.itemsize * _OFFSET.itemsize], _OFFSET)
    if not len(offsets) or int(offsets[-1]) != size or np.any(offsets[1:] < offsets[:-1]):
        raise DamagedShard(f"{index} is not the index of {path}: write it anew with sharmill sidecars")
    return offsets


class IndexedLines:
    """The lines of an uncompressed file, of which only those are read that are asked for; raises as ``read_offsets``.

    The file stays open as long as this is referred to.
    """

    def __init__(self, path: Path, index: Path) -> None:
        self._content = load(path, in_parts=True)
        self._offsets = read_offsets(index, path, len(self._content))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> bytes:
        begin, end = self._offsets[number : number + 2].tolist()
        return self._content[begin:end]


class ValueTable:
    """The items of a field of values, as ``ItemTable``.

    Args:
        path: of the file.
        lines: those of the file, if they are read or indexed already.
        ids: of the cuts that the items must belong to.

    Raises:
        DamagedShard: the file is not there or damaged, or its items are not those of the cuts.
    """

    def __init__(
        self, path: Path, *, lines: Sequence[bytes] | IndexedLines | None = None, ids: Sequence[str] | None = None
    ) -> None:
        self._path = path
        self._lines = read_json_lines(path) if lines is None else lines
        if ids is not None:
            _require_ids(self, ids)

    def __len__(self) -> int:
        return len(self._lines)

    def line(self, number: int) -> bytes:
        """Return the line of an item."""
        return self._lines[number]

    def pair(self, number: int) -> tuple[str, str]:
        """Return the cut id of an item, and ``json``; raises as ``item``."""
        return self.item(number).cut_id, "json"

    def item(self, number: int, *, copy: bool = True) -> Item:
        """Return an item.

        Raises:
            DamagedShard: the line is not JSON, or has no id of a cut.
        """
        values = decode_cut(self._path, self._lines[number])
        cut_id = values.pop("cut_id", None)
        if not isinstance(cut_id, str):
            raise self.damage(f"item {number} has no cut_id")
        return Item(cut_id, "json", None, values or None)

    def damage(self, what: str) -> DamagedShard:
        """Return the error that says what is wrong with this file."""
        return DamagedShard(f"{self._path}: {what}")


def _require_ids(table: ItemTable | ValueTable, ids: Sequence[str]) -> None:
    if len(table) != len(ids):
        raise table.damage(f"{len(table)} items for {len(ids)} cuts")
    for number, cut_id in enumerate(ids):
        if (found := table.pair(number)[0]) != cut_id:
            raise table.damage(f"item {number} is {found!r}, the cut there is {cut_id!r}")


def open_items(path: Path, ids: Sequence[str] | None = None) -> ItemTable | ValueTable:
    """Open the items of a file of a field, by its name a tar archive or JSON lines; raises as these."""
    return ItemTable(path, ids=ids) if path.suffix == ".tar" else ValueTable(path, ids=ids)


def read_field(path: Path, ids: Sequence[str] | None = None) -> Iterator[Item]:
    """Return the items of a file of a field, in order; raises as ``open_items`` and while they are read."""
    table = open_items(path, ids)
    return map(table.item, range(len(table)))


def num_frames(recording: dict[str, Any], sampling_rate: int, samples_per_frame: int) -> int:
    """Return ceil(samples at the rate of a codec / samples of its frames) of the audio that a Recording describes.

    Raises:
        LookupError, TypeError: it does not say how many samples there are, or at which rate.
    """
    samples = resampled_length(recording["num_samples"], recording["sampling_rate"], sampling_rate)
    return -(-samples // samples_per_frame)


def codes_dtype(codebook_size: int) -> np.dtype:
    """Return the smallest of int16, int32 and int64 that holds every code.

    Raises:
        ConfigError: none does.

    >>> codes_dtype(2016)
    dtype('int16')
    """
    for dtype in (np.int16, np.int32, np.int64):
        if codebook_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise ConfigError(f"a codebook of {codebook_size} entries is too large", code="bad_codec")


_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# numpy parses a header as Python; MemoryError is the parser's word for brackets within brackets.
_NO_HEADER = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError, SyntaxError, tokenize.TokenError,
    RecursionError, MemoryError,
)  # fmt: skip


def array_to_bytes(array: np.ndarray) -> bytes:
    """Return an array as the bytes of an ``.npy`` file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def array_from_bytes(data: bytes, where: str) -> np.ndarray:
    """Return the array of an ``.npy`` file; pickled objects are refused.

    ``np.load`` would also take archives of arrays, ignore what follows the array, and reserve whatever memory a header
    asks for.

    Raises:
        DamagedShard: it is not one; ``where`` says what in the message.
    """
    dtype, shape, column_major, start = array_layout(data, where)
    try:
        return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if column_major else "C")
    except ValueError as error:  # an array without numbers may have any shape in its header
        raise DamagedShard(f"{where}: {error}") from error


def array_layout(data: bytes, where: str) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    """Return type, shape, Fortran order and the position of the numbers of an ``.npy`` file that has them all.

    Raises:
        DamagedShard: as ``array_from_bytes``.
    """
    try:
        # Most arrays of a dataset share a few headers, and numpy parses one as Python.
        prefix, length = (10, data[8:10]) if data[6:7] == b"\1" else (12, data[8:12])
        layout, size = _parse_header(bytes(data[: prefix + int.from_bytes(length, "little")]))
        if len(data) != size:
            dtype, shape, _, start = layout
            raise ValueError(f"{len(data) - start} bytes are not an array of shape {shape} and type {dtype}")
        return layout
    except _NO_HEADER as error:
        raise DamagedShard(f"{where}: {error}") from error


@lru_cache(maxsize=4096)
def _parse_header(header: bytes) -> tuple[tuple[np.dtype, tuple[int, ...], bool, int], int]:
    """Return type, shape, Fortran order and the position of the numbers, and the size of the whole file."""
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    if version not in _READ_HEADER:
        raise ValueError(f"arrays of version {version} are not read")
    shape, column_major, dtype = _READ_HEADER[version](stream)
    if dtype.hasobject:
        raise ValueError("the array has pickled objects")
    if min(shape, default=0) < 0 or not dtype.itemsize:
        raise ValueError(f"there is no array of shape {shape} and type {dtype}")
    start = stream.tell()
    return (dtype, shape, column_major, start), start + math.prod(shape) * dtype.itemsize


# An object in a ``custom`` mapping that has all keys of one of these is one of lhotse's own manifests to lhotse.
_TAKEN_BY_LHOTSE: Final = ({"width"}, {"shape"}, {"array"}, {"id", "sources", "sampling_rate"})
# What the stage prepare puts behind ids that would not be unique.
_ID_SUFFIX: Final = re.compile("(-[0-9a-f]{16})?")


def cut_json(utterance: Utterance, *, sampling_rate: int, num_samples: int) -> dict[str, Any]:
    """Return the MonoCut of an utterance whose stored audio has ``num_samples`` samples at ``sampling_rate``.

    ``recording`` tells where the audio came from and is nothing to load; the audio itself is in ``target_audio``.
    """
    duration = num_samples / sampling_rate
    source = {"type": "file", "channels": [0], "source": utterance.segment.audio_filepath}
    language = _language(utterance.speaker, str(utterance.custom.get(ORIGINAL_TAG, "")))
    further = {key: plain_value(value) for key, value in utterance.further_keys().items() if key != ALIGNMENT}
    supervision = {
        "id": f"sup-{utterance.cut_id}",
        "recording_id": utterance.recording_id,
        "start": 0.0,
        "duration": duration,
        "channel": 0,
        "text": utterance.text,
        "language": language,
        "speaker": utterance.speaker,
        # All manifest keys, for NeMo looks for some of them here.
        "custom": {**utterance.typed_keys(), "language": language, **further},
        **({"alignment": utterance.custom[ALIGNMENT]} if ALIGNMENT in utterance.custom else {}),
    }
    return {
        "id": utterance.cut_id,
        "start": 0.0,
        "duration": duration,
        "channel": 0,
        "supervisions": [supervision],
        "recording": recording_json(utterance.recording_id, sampling_rate, num_samples) | {"sources": [source]},
        # Makes lhotse load the whole context: it lives on another time line than the cut.
        "custom": {CONTEXT_UNALIGNED: True},
        "type": "MonoCut",
    }


def read_utterances(path: Path) -> Iterator[tuple[dict[str, Any], Utterance]]:
    """Yield the cuts of a file with the utterances that they were made of.

    Raises:
        DamagedShard: it cannot be read, or a cut does not say what it was made of.
    """
    for cut in read_cuts(path):
        try:
            yield cut, utterance_of(cut)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DamagedShard(f"{path}: a cut does not say which record it was made of: {error!r}") from error


def utterance_of(cut: dict[str, Any]) -> Utterance:
    """Return the utterance that a cut was made of: its record, with the ids that follow from it.

    Of the ids in the cut only a suffix that tells files or segments of the same name apart is taken over.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: the cut carries no record.
    """
    supervision = cut["supervisions"][0]
    custom = supervision["custom"]
    path, offset, duration, text, speaker = (custom[key] for key in TYPED_KEYS)
    stored, channel = cut["recording"]["id"], None
    recording = _with_suffix(recording_id(path), stored)
    # A record of mono audio may have a channel too, which is not part of its ids.
    if "channel" in custom and recording != stored:
        channel = custom["channel"]
        recording = _with_suffix(recording_id(path, channel), stored)
    alignment = {ALIGNMENT: supervision["alignment"]} if "alignment" in supervision else {}
    return Utterance(
        Segment(0, path, offset, duration, False, channel=channel),
        text,
        speaker,
        custom={key: value for key, value in custom.items() if key not in TYPED_KEYS} | alignment,
        recording_id=recording,
        cut_id=_with_suffix(kept_id(custom) or segment_id(recording, offset, duration), cut["id"]),
    )


def _with_suffix(made: str, stored: str) -> str:
    """Return the stored id if it is the made one, with the hash behind it that makes an ambiguous id unique, or not."""
    return stored if stored.startswith(made) and _ID_SUFFIX.fullmatch(stored, len(made)) else made


@lru_cache(maxsize=100_000)
def _language(tag: str, original: str) -> str:
    """Return the language of a tag, as the record had it: ``en-US`` where the tag has ``en_US`` for NeMo."""
    language = parse_speaker_tag(tag).language
    found = re.search(r"\bLanguage:(\S+)", original)
    return found[1] if found and nemo_language(found[1]) == language else language


def plain_value(value: Any) -> Any:
    """Return a value as it is, or as JSON text where lhotse would take it for a manifest and fail to read the cut."""
    if isinstance(value, dict) and any(keys <= value.keys() for keys in _TAKEN_BY_LHOTSE):
        return msgspec.json.encode(value).decode()
    return value


def recording_json(recording_id: str, sampling_rate: int, num_samples: int) -> dict[str, Any]:
    """Return a Recording whose data lies beside it in the archive."""
    return {
        "id": recording_id,
        "sources": [{"type": "shar", "channels": [0], "source": ""}],
        "sampling_rate": sampling_rate,
        "num_samples": num_samples,
        "duration": num_samples / sampling_rate,
        "channel_ids": [0],
    }


def array_json(shape: tuple[int, ...]) -> dict[str, Any]:
    """Return an Array whose data lies beside it in the archive."""
    return {"storage_type": "shar", "storage_path": "", "storage_key": "", "shape": list(shape)}


def temporal_array_json(shape: tuple[int, ...], frame_shift: float) -> dict[str, Any]:
    """Return a TemporalArray whose last dimension is time, in frames of ``frame_shift`` seconds."""
    return {"array": array_json(shape), "temporal_dim": -1, "frame_shift": frame_shift, "start": 0}
