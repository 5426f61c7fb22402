"""Files of sources: patterns that name several files, checks that a file is readable, and lookup of lines by key.

In a path, ranges name numbered shards, ``*`` and ``?`` match files, and ``~`` is the home folder.
"""

import bz2
import codecs
import errno
import glob
import gzip
import io
import itertools
import json
import lzma
import math
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeVar, cast

import msgspec
import numpy as np
import xxhash

from sharmill.errors import ConfigError, FatalError, RejectRecord, refuse
from sharmill.files.cache import Cache
from sharmill.files.checksums import checksum, checksum_bytes
from sharmill.files.clients import FETCHES_AT_ONCE
from sharmill.files.disk import WRITE_ERRNOS
from sharmill.files.location import (
    Location,
    RemoteLocation,
    fetch,
    is_remote,
    is_url,
    open_location,
    read_head_of,
    tell_version,
)
from sharmill.files.regular import NotRegularError, open_regular
from sharmill.files.similar import describe_similar
from sharmill.prefetch import prefetch
from sharmill.registry import require_package

T = TypeVar("T")
# The part of a file that is read to identify it.
Digest = Literal["whole", "ends", "size"]
# NeMo's brackets around a range of numbers or a list.
_BRACKETS: Final = (r"\{", r"\}"), (r"\(", r"\)"), (r"\[", r"\]"), ("<", ">"), ("_OP_", "_CL_")
# An item must not contain brackets made of letters (_OP_ and _CL_), otherwise two lists would be read as one.
_ITEM: Final = r"(?:(?!_OP_|_CL_)[\w.-])+"
_RANGE: Final = re.compile(
    "|".join(rf"{opening}(\d+\.\.\d+|{_ITEM}(?:,{_ITEM})+){closing}" for opening, closing in _BRACKETS)
)
# Group 1 matches JSON strings, which are kept. The rest matches NaN and Infinity, which Python's json writes although
# JSON does not allow them.
_CONSTANT: Final = re.compile(rb'("(?:[^"\\]|\\.)*+"?)|(?<!-)NaN|-?Infinity', re.DOTALL)
_KEY_OF_CONSTANT: Final = re.compile(rb'"([^"]*)"\s*:\s*(-?(?:NaN|Infinity))')
_objects: Final = msgspec.json.Decoder(dict[str, Any])
_MAX_FILES: Final = 1_000_000
_MAX_DIGITS: Final = 18
# Maximum length of a line. A file with a longer line is not line-based, and the line would be read into memory
# completely.
_MAX_LINE_BYTES: Final = 64 << 20
# Number of bytes at the start of a file that show whether it can contain records.
_HEAD_BYTES: Final = 1 << 16
_BOMS: Final = {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    codecs.BOM_UTF8: "UTF-8 with a byte order mark",
}
_COMPRESSED: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
# The compression formats that are unpacked while reading, and their file name suffixes.
_TEXT_COMPRESSIONS: Final = ("gzip", "bzip2", "xz", "zstd")
_PACKED_SUFFIXES: Final = (".gz", ".bz2", ".xz", ".zst")


def identify_files(files: Iterable[Location], digest: Digest = "whole") -> dict[str, Any]:
    """Return the size and the checksum of each file, by file number and name.

    Names do not include folders, so that the files may be moved. ``digest`` names the part of the file that the
    checksum covers; with ``size``, there is no checksum.
    """

    def identify(file: Location) -> list[Any]:
        # Ask for the version first, so that a copy of an earlier version is replaced.
        version = tell_version(file)
        if digest == "size":
            return version
        if digest == "ends":
            return [version[0], checksum_bytes(b"".join(read_ends(file, "file")))]
        return [version[0], checksum(fetch(file))]

    files = list(files)
    told = prefetch(identify, files, threads=FETCHES_AT_ONCE, ahead=FETCHES_AT_ONCE)
    return {f"{number} {file.name}": one for number, (file, one) in enumerate(zip(files, told, strict=True))}


def expand_home(path: str) -> Path:
    """Expand ``~`` in a path. Unlike ``Path.expanduser``, this keeps the path of an unknown user unchanged."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def find_files(patterns: Iterable[str], cache: Cache | None = None) -> list[Location]:
    """Return the files that patterns name, in the order of the patterns; matches of ``*`` and ``?`` are sorted by name.

    Files behind URLs are copied into ``cache``, by default the user's cache, when they are opened.

    Raises:
        ConfigError: a range is descending, there are too many files, or ``*`` and ``?`` match no file.
    """
    files: list[Location] = []
    for pattern in patterns:
        if is_url(pattern):
            problem = f"{pattern} contains *, but files behind URLs cannot be listed; use a range such as {{0..63}}"
            refuse(("*" in pattern, problem))
            files += [RemoteLocation(name, cache or Cache.at(None)) for name in expand_shards(pattern)]
            continue
        path = str(expand_home(pattern))
        for name in expand_shards(path):
            found = sorted(_on_disk(name)) if "*" in name or "?" in name else [name]
            problem = f"{name} matches no files (current folder: {Path.cwd()}); correct the path, or add the files"
            refuse((not found, problem), code="missing_input")
            files += map(Path, found)
        refuse((len(files) > _MAX_FILES, f"the patterns up to {pattern} name more than {_MAX_FILES:,} files"))
    return files


def names_several(pattern: str) -> bool:
    """Return True if a path is a pattern that may stand for several files."""
    return any(_find_ranges(str(expand_home(pattern)))) or "*" in pattern or "?" in pattern


def _on_disk(name: str) -> Iterable[str]:
    """Return the path with exactly this name if it exists, otherwise the matches of ``*`` and ``?``."""
    is_there = os.path.lexists(name)
    return [name] if is_there else glob.iglob(name.replace("[", "[[]"), recursive=True)  # noqa: PTH207


def _find_ranges(pattern: str) -> Iterator[re.Match[str]]:
    """Yield the ranges and lists in a pattern, except brackets in the name of an existing file or folder."""
    begin, position = "", 0  # begin: the pattern up to ``position``, with the first item of each range
    for match in _RANGE.finditer(pattern):
        part = pattern[position : match.end()] + pattern[match.end() :].partition("/")[0]
        if not any(_on_disk(begin + part)):
            begin += pattern[position : match.start()] + re.split(r",|\.\.", match[match.lastindex or 0])[0]
            position = match.end()
            yield match


def expand_shards(pattern: str) -> list[str]:
    """Expand ranges ``{1..3}`` and lists ``{1,3}`` in a pattern, in any of NeMo's kinds of brackets.

    Brackets in the name of an existing file or folder are kept.

    >>> expand_shards("m__OP_8..10_CL_.json"), expand_shards("{dev,test}.json")
    (['m_8.json', 'm_9.json', 'm_10.json'], ['dev.json', 'test.json'])

    Raises:
        ConfigError: a range is descending or inside a list, or there are too many files.
    """
    names: list[tuple[Iterable[str], int]] = []
    texts, position = [], 0
    for match in _find_ranges(pattern):
        texts.append(pattern[position : match.start()])
        position = match.end()
        body = match[match.lastindex or 0]
        if "," in body:
            refuse((".." in body, f"the list {match[0]} in {pattern} contains a range; list each number instead"))
            names.append((body.split(","), body.count(",") + 1))
            continue
        first, last = body.split("..")
        is_long = max(len(first), len(last)) > _MAX_DIGITS
        refuse((is_long, f"the numbers of a range in {pattern[:100]} have more than {_MAX_DIGITS} digits"))
        is_backwards = int(last) < int(first)
        refuse((is_backwards, f"the range {match[0]} in {pattern} is descending; write the lower number first"))
        numbers = map(f"{{:0{len(first)}d}}".format, range(int(first), int(last) + 1))
        names.append((numbers, int(last) + 1 - int(first)))
    count = math.prod(number for _, number in names)
    refuse((count > _MAX_FILES, f"the ranges in {pattern} name {count:,} files, more than {_MAX_FILES:,}"))
    choices = [[f"{text}{name}" for name in found] for text, (found, _) in zip(texts, names, strict=True)]
    return ["".join(chosen) + pattern[position:] for chosen in itertools.product(*choices)]


def open_input(path: Location, kind: str) -> BinaryIO:
    """Open a file that a source names.

    Args:
        kind: the source's key that names the file, for messages.

    Raises:
        ConfigError: the file is missing or not a regular file.
    """
    with _raise_missing_input(path, kind):
        return open_location(path)


@contextmanager
def _raise_missing_input(path: Location, kind: str) -> Iterator[None]:
    """Turn errors from opening a file into the ConfigError that ``open_input`` raises."""
    try:
        yield
    except NotRegularError as error:
        sentence = "is not a regular file; copy its content into a regular file"
        if isinstance(path, Path) and path.is_dir():
            sentence = f"is a folder; name the {kind} file in it"
        raise bad_file(path, kind, sentence) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "correct its path"
        if is_remote(path):
            remedy = "correct its URL, or run again when the server provides it"
        elif path != path.absolute():
            remedy = f"the path is relative to {Path.cwd()}; run the command from the right folder, or {remedy}"
        if re.search(r"[,({<[]|_OP_", path.name):
            remedy += "; to name several files, use a list of paths, or {0..63}, {1,3}, * or ? in a path"
        remedy += describe_similar(path) if isinstance(path, Path) else ""
        raise ConfigError(f"cannot read the {kind} {path}: {reason}; {remedy}", code="missing_input") from error


def read_head(path: Location, kind: str, size: int) -> bytes:
    """Return the first bytes of a file without copying it; raises the errors of ``open_input``."""
    with _raise_missing_input(path, kind):
        return read_head_of(path, size)


def unpacked_name(name: str) -> str:
    """Return the name of a file without the suffix of its compression.

    >>> unpacked_name("train.jsonl.zst"), unpacked_name("train.json")
    ('train.jsonl', 'train.json')
    """
    return name[: -len(end)] if (end := os.path.splitext(name)[1]).lower() in _PACKED_SUFFIXES else name  # noqa: PTH122


def read_ends(path: Location, kind: str, compressed: Collection[str] = ()) -> tuple[bytes, bytes]:
    """Return the first 64 KiB and the last MiB of a file; ``kind`` is the source's key that names it.

    Raises:
        ConfigError: the file is missing, not a regular file, empty, or compressed in a format that is not in
            ``compressed``.
    """
    with open_input(path, kind) as stream:
        head = stream.read(_HEAD_BYTES)
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - (1 << 20)))
        tail = stream.read()
    refuse_file(path, kind, (not head.strip(), "is empty"))
    refuse_compressed(path, kind, head, compressed)
    return head, tail


def refuse_compressed(path: Location, kind: str, head: bytes, compressed: Collection[str] = ()) -> None:
    """Raise ConfigError if a file that begins with ``head`` is compressed in a format that is not in ``compressed``."""
    found = _compression(head)
    is_other = found is not None and found not in compressed
    refuse_file(path, kind, (is_other, f"is compressed ({found}); unpack it, and name the unpacked file"))


def bad_file(path: Location, kind: str, sentence: str) -> ConfigError:
    """Return the error for a file that its source cannot use."""
    return ConfigError(f"the {kind} {path} {sentence}", code="bad_manifest")


def refuse_file(path: Location, kind: str, *problems: tuple[object, str]) -> None:
    """Raise the error of ``bad_file`` for the first of the problems (condition, sentence) whose condition is true."""
    refuse(*((is_there, f"the {kind} {path} {sentence}") for is_there, sentence in problems), code="bad_manifest")


def read_small(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file of limited size.

    System and network errors other than a missing permission remain OSErrors, so that the unit is retried.

    Raises:
        RejectRecord: ``malformed`` if the user may not read the file, or if it is too large or not a regular file.
    """
    try:
        with open_regular(path) as stream:
            # Limit the buffer to the file size, since allocating a large buffer takes longer than reading a text.
            data = stream.read(min(os.fstat(stream.fileno()).st_size, max_bytes) + 1)
    except (PermissionError, IsADirectoryError) as error:
        raise RejectRecord("malformed", f"{path.name} is not readable by this user: {error.strerror}") from error
    except NotRegularError as error:
        raise RejectRecord("malformed", f"{path.name} is not a regular file") from error
    if len(data) > max_bytes:
        raise RejectRecord("malformed", f"{path.name} is larger than {max_bytes >> 20} MiB; split it")
    return data


def decode_text(data: bytes, encoding: str, name: str) -> str:
    """Decode bytes; raise RejectRecord ``malformed`` with a message about ``name`` if ``encoding`` is wrong."""
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RejectRecord(
            "malformed", f"{name} is not valid {encoding}; set the key encoding of the source"
        ) from error


def split_lines(text: str) -> list[str]:
    """Split a text into lines, which end with a newline, a carriage return or both.

    ``str.splitlines`` also splits at characters that cells, words or names may contain, such as U+0085 or U+2028.
    """
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def decode_json(data: bytes, decoder: msgspec.json.Decoder[T], problem: str) -> T:
    """Decode a JSON text; raise RejectRecord ``malformed`` with a message that begins with ``problem``."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        key = _KEY_OF_CONSTANT.search(data)
        reason = (
            f"{key[1].decode('utf-8', 'replace')[:40]} is {key[2].decode()}, which is not valid JSON" if key else error
        )
        raise RejectRecord("malformed", f"{problem}: {reason}") from error


def decode_object(data: bytes, problem: str) -> dict[str, Any]:
    """Decode a JSON object; NaN and Infinity, which Python's json writes, become floats.

    Raises:
        RejectRecord: ``malformed``, as in ``decode_json``.
    """
    if b"NaN" not in data and b"Infinity" not in data:
        return decode_json(data, _objects, problem)
    strict = _CONSTANT.sub(lambda match: match[1] or b"null", data)
    record = decode_json(strict, _objects, problem)
    try:
        return record if strict == data else json.loads(data, parse_constant=float)
    except RecursionError as error:
        raise RejectRecord("malformed", f"{problem}: the nesting is too deep") from error


def encode_record(record: dict[str, Any], source: bytes) -> bytes:
    """Encode a record; keep NaN and Infinity if the original JSON ``source`` has them, so that they are counted."""
    is_strict = b"NaN" not in source and b"Infinity" not in source
    return msgspec.json.encode(record) if is_strict else json.dumps(record).encode()


def check_text(path: Location, kind: str) -> bytes:
    """Return the unpacked start of a text file; raise ConfigError as ``read_ends`` does, and also if it is binary."""
    head, _, _ = _read_text_ends(path, kind)
    refuse_file(path, kind, (b"\0" in head, "is binary or UTF-16 instead of text; save it as UTF-8"))
    return head


def _read_text_ends(path: Location, kind: str) -> tuple[bytes, bytes, bool]:
    """Return (head, tail, is_compressed) of a text file. A compressed file has an unpacked head and an empty tail."""
    head, tail = read_ends(path, kind, _TEXT_COMPRESSIONS)
    if _compression(head) is None:
        return head, tail, False
    with _open_unpacked(path, kind) as stream, refusing_damage(path, kind):
        head = stream.read(_HEAD_BYTES)
    refuse_file(path, kind, (not head.strip(), "is empty"))
    return head, b"", True


def _compression(head: bytes) -> str | None:
    return next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)


class _CompressedFile(io.BufferedReader):
    """A compressed file that records whether it was read to its end."""

    has_ended = False

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.has_ended = not data
        return data


class _CheckedEnd(io.BufferedIOBase):
    """Mixin that raises an error if other bytes follow the compressed data; BZ2File and LZMAFile ignore such bytes."""

    def __init__(self, stream: Any) -> None:
        self._compressed = _CompressedFile(stream)
        super().__init__(self._compressed)  # type: ignore[call-arg]

    def readinto(self, buffer: Any, /) -> int:
        size = super().readinto(buffer)
        if not size and not self._compressed.has_ended:
            raise OSError("the compressed data is followed by other bytes")
        return size


class _Bzip2(_CheckedEnd, bz2.BZ2File):
    """A bzip2 file whose end is checked."""


class _Xz(_CheckedEnd, lzma.LZMAFile):
    """An xz file whose end is checked."""


class _Unpacked(io.BufferedReader):
    """An unpacked view of a compressed file; its buffer is needed because a GzipFile reads single lines slowly."""

    def __init__(self, packed: Any, stream: BinaryIO) -> None:
        super().__init__(packed, 1 << 20)
        self._stream = stream

    def close(self) -> None:
        super().close()
        self._stream.close()


def _open_unpacked(path: Location, kind: str) -> BinaryIO:
    """Open a plain or compressed text file to be read once in order, since pyarrow's zstd stream cannot seek."""
    stream = open_input(path, kind)
    name = _compression(cast("io.BufferedReader", stream).peek(8))
    openers: dict[str | None, Callable[[Any], Any]] = {
        "gzip": lambda packed: gzip.GzipFile(fileobj=packed), "bzip2": _Bzip2, "xz": _Xz, "zstd": _open_zstd,
    }  # fmt: skip
    return cast("BinaryIO", _Unpacked(openers[name](stream), stream)) if name in openers else stream


def _open_zstd(stream: BinaryIO) -> Any:
    require_package("pyarrow")
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream), "zstd")


def open_lines(path: Location, kind: str = "file") -> BinaryIO:
    """Open a text file, plain or compressed; positions count unpacked bytes.

    A zstd file is unpacked into a temporary file.

    Raises:
        FatalError: the disk has no room for the temporary file.
    """
    stream = _open_unpacked(path, kind)
    if stream.seekable():
        return stream
    with stream, refusing_damage(path, kind):
        return _store(iter(lambda: stream.read(1 << 20), b""), path)


def _store(parts: Iterable[bytes], path: Location) -> BinaryIO:
    """Store the unpacked content of a file in an unnamed temporary file below TMPDIR."""
    try:
        stored = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - the caller closes it
        stored.writelines(parts)
        stored.seek(0)
    except OSError as error:
        if error.errno not in {*WRITE_ERRNOS, errno.EFBIG}:  # only writing raises these
            raise
        raise FatalError(
            f"no room to unpack {path} in {tempfile.gettempdir()}: {error.strerror}; free space "
            "there, or set TMPDIR to a folder with more space, and run the same command again",
            code="disk",
        ) from error
    return stored


@contextmanager
def refusing_damage(path: Location, kind: str) -> Iterator[None]:
    """Raise ConfigError if a compressed file turns out to be damaged while it is read."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if getattr(error, "errno", None) is not None:  # a system error, not damage to the file
            raise
        raise bad_file(path, kind, f"is damaged or truncated ({error}); copy it again") from error


def iterate_lines(path: Location, kind: str) -> Iterator[tuple[int, bytes]]:
    """Yield (end position, line) for all nonblank lines of a file; ``kind`` is the source's key that names it.

    Raises:
        ConfigError: the file cannot be read; also as in ``iterate_stream``.
    """
    with _open_unpacked(path, kind) as stream:
        yield from iterate_stream(stream, path, kind)


def iterate_stream(stream: BinaryIO, path: Location, kind: str, position: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (end position, line) for the nonblank lines of an open file from ``position`` on.

    Raises:
        ConfigError: the file is damaged or truncated, or has a line of more than 64 MiB.
    """
    with refusing_damage(path, kind):
        while line := stream.readline(_MAX_LINE_BYTES + 1):
            if len(line) > _MAX_LINE_BYTES:
                raise bad_file(path, kind, "has a line of more than 64 MiB; write each record on its own line")
            position += len(line)
            if stripped := line.strip():
                yield position, stripped


def check_json_lines(
    path: Location,
    kind: str,
    remedy: str,
    check: Callable[[dict[str, Any]], str | None] = lambda first: None,
) -> None:
    """Check that a file can contain JSON lines.

    Args:
        path: the file.
        kind: the source's key that names it.
        remedy: end of the message if the file does not have one record per line.
        check: function that returns a message about what is wrong with the first object, or None.

    Raises:
        ConfigError: the file is missing, empty, binary, a zip, one JSON array, not JSON, or in another encoding; its
            records are of another kind; or its last line is truncated.
    """
    head, tail, is_packed = _read_text_ends(path, kind)
    _check_head(path, kind, head, remedy)
    objects = (found for line in head.splitlines() if isinstance(found := _parse(line), dict))
    wrong = check(next(objects, {}))
    is_whole = is_packed or tail.endswith(b"\n") or _parse(tail.rsplit(b"\n", 1)[-1]) is not ...
    cut_off = "seems to be truncated: its last line is not complete JSON; copy the file again, or remove that line"
    refuse_file(path, kind, (wrong, str(wrong)), (not is_whole, cut_off))


def _parse(line: bytes) -> Any:
    """Return the JSON value of a line, or ``...`` if it is not JSON."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ...


def _check_head(path: Location, kind: str, head: bytes, remedy: str) -> None:
    """Raise ConfigError unless a file that begins with ``head`` may contain JSON lines in UTF-8."""
    lines = [line.strip() for line in head.splitlines() if line.strip()]
    first = lines[0] if lines else b""
    is_table = any(mark in first for mark in (b",", b"\t", b";", b"|"))
    looks_like = "a table (CSV or TSV)" if is_table else "plain text"
    # Single bad lines become rejects, but if no line looks like a record, the file is of another kind.
    has_objects = any(line.startswith(b"{") for line in lines)
    refuse_file(
        path,
        kind,
        *((head.startswith(mark), f"is {encoding}; save it as plain UTF-8") for mark, encoding in _BOMS.items()),
        (b"\0" in head, "is binary or UTF-16; save it as JSON lines in UTF-8"),
        (not lines, "is empty"),
        (first.startswith(b"["), f"is one JSON array; {remedy}"),
        (first == b"{", f"has records that span several lines; {remedy}"),
        (not has_objects, f"is {looks_like}, not JSON lines; {remedy}"),
    )


class KeyedLines:
    """An index that finds lines of files by their keys; it is built at the first lookup.

    It needs 16 bytes of memory per line. Lines of plain files are read from the files themselves. Compressed files,
    which have no random access, are unpacked into an unnamed temporary file below TMPDIR.

    Args:
        files: plain or compressed files.
        kind: the source's key that names them.
        key_of: function that returns the key of a line, or None for a line that cannot be looked up.
    """

    def __init__(self, files: Sequence[Location], kind: str, key_of: Callable[[bytes], bytes | None]) -> None:
        self._files = files
        self._kind = kind
        self._key_of = key_of

    def find(self, key: bytes) -> list[bytes]:
        """Return the lines with a key, in the order of the files."""
        wanted = np.uint64(xxhash.xxh3_64_intdigest(key))
        begin, end = (np.searchsorted(self._index["key"], wanted, side) for side in ("left", "right"))
        lines = [self._line(int(place)) for place in self._index["place"][begin:end]]
        return [line for line in lines if self._key_of(line) == key]

    @cached_property
    def _streams(self) -> list[BinaryIO]:
        return [self._open(file) for file in self._files]

    @cached_property
    def _index(self) -> np.ndarray:
        """An array of (hash of the key, location), sorted by hash; a location is file number << 48 | position."""
        index = np.fromiter(self._rows(), [("key", np.uint64), ("place", np.uint64)])
        return index[np.argsort(index["key"], kind="stable")]

    def _rows(self) -> Iterator[tuple[int, int]]:
        for number, stream in enumerate(self._streams):
            begin = 0
            for end, line in iterate_stream(stream, self._files[number], self._kind):
                if (key := self._key_of(line)) is not None:
                    yield xxhash.xxh3_64_intdigest(key), number << 48 | begin
                begin = end

    def _line(self, place: int) -> bytes:
        number, position = divmod(place, 1 << 48)
        self._streams[number].seek(position)
        return next(iterate_stream(self._streams[number], self._files[number], self._kind))[1]

    def _open(self, file: Location) -> BinaryIO:
        stream = _open_unpacked(file, self._kind)
        if not isinstance(stream, _Unpacked):
            return stream
        with stream:
            return _store((line + b"\n" for _, line in iterate_stream(stream, file, self._kind)), file)
