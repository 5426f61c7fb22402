"""Sources of a chain, in the form of shards that sharmill's reader divides, shuffles and resumes.

A shard is a file of lines, or an archive named in a list. An example that cannot be read has an error as its value, and
the chain raises the error or skips the example.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import msgspec
import numpy as np

from sharmill.audio.files import open_audio
from sharmill.audio.roots import AudioRoots
from sharmill.errors import DamagedShard, RejectRecord, refuse
from sharmill.files.cache import Cache, Copy
from sharmill.files.checksums import checksum_bytes
from sharmill.files.clients import Version
from sharmill.files.location import Location, RemoteLocation, is_remote, is_url, local
from sharmill.shar.fields import POSITION
from sharmill.shar.reading.shard_source import ShardSource
from sharmill.sources.files import decode_json, decode_text, find_files, iterate_lines, open_input, read_ends
from sharmill.sources.tars import Archive, WenetSource, read_part

Paths = str | Path | Sequence[str | Path]

# Maximum size of an archive member in bytes (nine hours of speech at 16 kHz), since each member is read as a whole.
_MAX_MEMBER_BYTES: Final = 1 << 30
# Maximum number of items of a source without a length, because all positions are held in memory.
_MAX_ITEMS: Final = 1 << 24
# Number of bytes read at each end of a file, to distinguish the file from others of the same size.
_BLOCK: Final = 4096
# Hashes of the (process, cache, URL) triples whose version was checked with the server; the URLs themselves would take
# more memory.
_asked: Final[set[int]] = set()
# Process ids are reused; together with this random token, they are unique.
_STARTED: Final = os.urandom(16).hex()
_record_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(slots=True)
class Origin:
    """The place that an example came from.

    Attributes:
        name: name of the example in error messages.
        custom: position of the example, under the key that ``SharReader.mark_consumed`` reads.
        source: the chain's source that the example came from; set by the chain.
    """

    name: str
    custom: dict[str, tuple[int, ...]]
    source: Any = None


@dataclass(slots=True)
class Example:
    """A value that a chain passes from step to step, or the error of an unreadable value, with its origins."""

    value: Any
    origins: tuple[Origin, ...]


@dataclass
class _Shard:
    """An open shard; reading an example may return an error as its value.

    Attributes:
        name_of: returns the name of an example for error messages.
        read_value: reads an example; raises RejectRecord. The function refers to the open file and thereby keeps it
            open.
    """

    name_of: Callable[[int], str]
    read_value: Callable[[int], Any]

    def read(self, number: int, position: tuple[int, ...]) -> Example:
        name = self.name_of(number)
        try:
            value = self.read_value(number)
        except RejectRecord as reject:
            value = DamagedShard(f"{name}: {reject.detail}")
        return Example(value, (Origin(name, {POSITION: position}),))


class Items(ShardSource):
    """A source that provides the items of any iterable.

    Without random access, every reader also iterates over the items of other readers.

    Args:
        items: an iterable, or a function that returns one. The constructor reads an iterator into memory. It calls a
            function once to count the items, and each reader calls the function in each epoch.
    """

    num_shards = 1

    def __init__(self, items: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        refuse(
            (isinstance(items, (str, bytes)),
             "a chain cannot begin with a name: give it a RawList, ShardList, TextLines or the items themselves"),
            (not callable(items) and not hasattr(items, "__iter__") and not hasattr(items, "__getitem__"),
             f"a chain cannot begin with {items!r}: give it an iterable or a function that returns one"),
        )  # fmt: skip
        self._is_function = callable(items) and not isinstance(items, Iterable)
        self._items: Any = list(_limit_items(items)) if isinstance(items, Iterator) else items
        found = self._begin()
        self.sequential = not isinstance(found, Sequence)
        # The items are counted once here rather than in every worker process.
        try:
            self._count = len(found)  # type: ignore[arg-type]  # it may have no length
        except TypeError:
            self._count = sum(1 for _ in _limit_items(found))

    @property
    def identity(self) -> dict[str, Any]:
        """The number of items; changed items are not detected if their number stays the same."""
        return {"items": self.count(0)}

    def count(self, shard: int) -> int:
        return self._count

    def _begin(self) -> Iterable[Any]:
        return self._items() if self._is_function else self._items

    def open(self, shard: int, epoch: int) -> _Shard:
        found = self._begin()
        items = enumerate(found)

        def take(number: int) -> Any:
            if not self.sequential and len(cast("Sequence[Any]", found)) == self._count:
                return cast("Sequence[Any]", found)[number]
            for place, item in items:
                # The reader of the last item also checks that no further items follow.
                if place == number and (number < self._count - 1 or not any(True for _ in items)):
                    return item
            raise RejectRecord("malformed", f"the source no longer has the {self._count} items that it had at first")

        return _Shard("item {}".format, take)


def _limit_items(items: Iterable[Any]) -> Iterator[Any]:
    """Yield items; raise ConfigError if there are too many, as from an endless iterable."""
    left = iter(items)
    yield from islice(left, _MAX_ITEMS)
    refuse((any(True for _ in left), f"a source has more than {_MAX_ITEMS} items: give a sequence, or TextLines"))


class _Command:
    """A client that runs commands such as ``pipe:ais get ...`` and uses their output as the content of a file."""

    def version(self, url: str) -> Version:
        return Version(-1, "")

    def download(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> Version:
        command = url.strip().removeprefix("pipe:").removesuffix("|")
        done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.PIPE)
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip()[-200:]
            raise RejectRecord(
                "missing_audio", f"the command {command!r} ended with {done.returncode}: {' '.join(said.split())}"
            )
        return self.version(url)


class _Opener(Cache):
    """A cache for the URLs and commands that a WeNet list names.

    Each process checks once per URL that its copy is current. Output of commands is not shared between processes.
    """

    def get(self, url: str, xxh3: str = "", max_bytes: float = math.inf) -> Copy:
        if is_url(url) and (asked := hash((os.getpid(), self.folder, url))) not in _asked:
            if self.path_of(url).exists():
                self.refresh(url)
            _asked.add(asked)
        return super().get(url, xxh3, max_bytes)

    def path_of(self, url: str, xxh3: str = "") -> Path:
        return super().path_of(url, xxh3 or ("" if is_url(url) else f"{_STARTED}{os.getpid()}"))

    def ask(self, url: str, call: Callable[[Any], Any]) -> Any:
        return super().ask(url, call) if is_url(url) else call(cast("Any", _Command()))


@dataclass(frozen=True, kw_only=True)
class _ListSource(WenetSource):
    """A WeNet list read by a chain; lines may name URLs (if there is no root) and commands (with ``allow_pipe``)."""

    allow_pipe: bool = False

    def locate(self, roots: AudioRoots, text: str) -> Archive:
        file = self.remote(text)
        return super().locate(roots, text) if file is None else Archive(file, text, text)

    def remote(self, text: str) -> Location | None:
        """Return the location if a line names a URL or a command; None for a path."""
        is_command = text.startswith("pipe:") or text.rstrip().endswith("|")
        if is_command and not self.allow_pipe:
            raise RejectRecord("outside_root", f"{text!r} is a command, which runs only with allow_pipe=True")
        anywhere = self.audio_root is None and is_url(text)
        return RemoteLocation(text, self.cache) if is_command or anywhere else None


class _LineFiles(ShardSource):
    """The non-blank lines of files; the offset of each line takes 8 bytes of memory."""

    def __init__(self, files: Sequence[Location], parse: Callable[[str, bytes], Any]) -> None:
        self._files, self.num_shards = files, len(files)
        self._parse = parse
        self._ends: dict[int, np.ndarray] = {}

    @property
    def identity(self) -> dict[str, Any]:
        """A checksum of the names, sizes, and first and last blocks of the files; other changes are not detected."""
        return {"files": checksum_bytes(msgspec.json.encode([_fingerprint(file) for file in self._files]))}

    def count(self, shard: int) -> int:
        return len(self._ends_of(shard))

    def open(self, shard: int, epoch: int) -> _Shard:
        path, ends = self._files[shard], self._ends_of(shard)
        stream = open_input(path, "list")

        def read_line(number: int) -> Any:
            start, end = int(ends[number - 1]) if number else 0, int(ends[number])
            line = os.pread(stream.fileno(), end - start, start).strip()
            return self._parse(f"{path.name}:{number + 1}", line)

        return _Shard(lambda number: f"{path}, record {number + 1}", read_line)

    def _ends_of(self, shard: int) -> np.ndarray:
        """Return the offset at which each non-blank line ends, int64 (lines,); preceding blank lines count as part of
        it.
        """
        if shard not in self._ends:
            ends = (end for end, _ in iterate_lines(self._files[shard], "list"))
            self._ends[shard] = np.fromiter(ends, np.int64)
        return self._ends[shard]


def _fingerprint(path: Location) -> tuple[str, int, str]:
    """Return the name and size of a file, and a checksum of its first and last blocks."""
    with open_input(path, "list") as stream:
        size = os.fstat(stream.fileno()).st_size
        ends = os.pread(stream.fileno(), _BLOCK, 0) + os.pread(stream.fileno(), _BLOCK, max(0, size - _BLOCK))
    return path.name, size, checksum_bytes(ends)


class TextLines(_LineFiles):
    """Lines of text as examples ``{"key": "books.txt:12", "txt": "..."}``; blank lines are ignored and not numbered.

    Args:
        files: one or more paths, which may contain ranges such as ``{0..9}``, ``*`` and ``?``.
    """

    def __init__(self, files: Paths) -> None:
        found = find_files(_as_texts(files), _Opener.at(None))
        for path in found:
            read_ends(path, "text")
        super().__init__(found, _parse_text)


def _parse_text(key: str, line: bytes) -> dict[str, str]:
    try:
        return {"key": key, "txt": line.decode("utf-8")}
    except UnicodeDecodeError as error:
        raise RejectRecord("malformed", f"the line is not UTF-8: {error}") from error


class RawList(_LineFiles):
    """WeNet's ``raw`` lists of JSON lines with ``key``, ``wav`` and, except for inference, ``txt``.

    Other keys are kept. ``wav`` becomes the path of the file or, for a URL, its bytes. If a line has ``start`` and
    ``end``, ``decode_wav`` decodes only the part between these seconds.

    Args:
        files: one or more paths, which may contain ranges such as ``{0..9}``, ``*`` and ``?``.
        audio_root: folder or URL that contains every ``wav``; by default any absolute path or URL is accepted.
        allow_pipe: run commands in ``wav``, such as ``pipe:ais get ...``; by default such a line is an error.
        cache_dir: folder for downloads and the output of commands; by default the user's cache.
        cache_gib: maximum size of the cache in GiB.
    """

    def __init__(
        self,
        files: Paths,
        audio_root: str | Path | None = None,
        *,
        allow_pipe: bool = False,
        cache_dir: str | Path | None = None,
        cache_gib: float = 100.0,
    ) -> None:
        self._source = _wenet("raw", files, audio_root, allow_pipe, _Opener.at(cache_dir, cache_gib))
        self._roots = AudioRoots.of([self._source.audio_root], self._source.cache)
        super().__init__(self._source.files, self._parse_record)

    def _parse_record(self, _: str, line: bytes) -> dict[str, Any]:
        record = decode_json(line, _record_decoder, "the line is not a JSON object")
        for name in ("key", "wav", "txt"):
            if not isinstance(record.get(name, "" if name == "txt" else None), str):
                raise RejectRecord("missing_field", f"the line has no string {name!r}")
        start, end = record.get("start", 0), record.get("end")
        if type(start) not in (int, float) or not (end is None or (type(end) in (int, float) and 0 <= start < end)):
            raise RejectRecord("malformed", "start and end must be times in seconds, with end after start")
        file = self._source.remote(record["wav"]) or self._roots.path_of(*self._roots.place(0, record["wav"]))
        return record | {"wav": local(file).read_bytes() if is_remote(file) else str(file)}


class ShardList(ShardSource):
    """WeNet's ``shard`` lists of tar archives, in which members with the same key form a sample.

    The key of a member is its name up to the last dot. An example has ``key``, the audio's bytes as ``wav``, the text,
    if any, as ``txt``, and the bytes of every further member under its suffix. A sample is an error if the archive is
    damaged there, if two of its members have the same name, if its key occurred earlier in the archive, or if it does
    not have exactly one audio member.

    Args:
        files: one or more paths, which may contain ranges such as ``{0..9}``, ``*`` and ``?``.
        root: folder or URL that contains every archive; by default any absolute path or URL is accepted.
        encoding: encoding of the texts.
        allow_pipe: run lines that are commands, such as ``pipe:ais get ...``; by default such a line is an error.
        cache_dir: folder for downloads and the output of commands; by default the user's cache.
        cache_gib: maximum size of the cache in GiB.
    """

    def __init__(
        self,
        files: Paths,
        root: str | Path | None = None,
        encoding: str = "utf-8",
        *,
        allow_pipe: bool = False,
        cache_dir: str | Path | None = None,
        cache_gib: float = 100.0,
    ) -> None:
        source = _wenet("shard", files, root, allow_pipe, _Opener.at(cache_dir, cache_gib), encoding=encoding)
        self._archives, self._source = source.archives, source
        self.num_shards = len(source.archives)
        self._counts: dict[int, int] = {}

    @property
    def identity(self) -> dict[str, Any]:
        """A checksum of the names and sizes of the archives.

        Changed content of the same size is not detected, because reading many archives may be slow.
        """
        return {"archives": checksum_bytes(msgspec.json.encode(list(self._source.sizes())))}

    def count(self, shard: int) -> int:
        """Return the number of samples according to the archive's headers; damaged places count as samples."""
        if shard not in self._counts:
            self._counts[shard] = sum(1 for _ in self._source.samples(shard))
        return self._counts[shard]

    def open(self, shard: int, epoch: int) -> _Shard:
        path, items = self._archives[shard].path, list(self._source.samples(shard))
        first: dict[str, int] = {}
        for number, item in enumerate(items):
            first.setdefault(item.key, number)
        open_archive = cache(lambda: open_audio(path))

        def name_of(number: int) -> str:
            if number >= len(items) or items[number].damage is not None:
                return str(path)
            return f"{path}, {items[number].key[:200]!r}"

        def read_sample(number: int) -> dict[str, Any]:
            if number >= len(items):
                raise RejectRecord("malformed", "the archive was changed while it was being read")
            sample = items[number]
            if sample.damage is not None:
                raise RejectRecord("unreadable_audio", sample.damage.detail)
            if first[sample.key] != number:
                raise RejectRecord("ambiguous_audio", "the archive has an earlier sample with this key")
            audio = self._source.audio_of(sample)
            value: dict[str, Any] = {}
            for suffix, member in sample.members:
                data = read_part(open_archive(), member, _MAX_MEMBER_BYTES)
                text = decode_text(data, self._source.encoding, "the text").strip() if suffix == "txt" else None
                value["wav" if member is audio else suffix] = data if text is None else text
            return value | {"key": sample.key}

        return _Shard(name_of, read_sample)


def _wenet(
    kind: str, files: Paths, root: str | Path | None, allow_pipe: bool, cache: Cache, **options: Any
) -> _ListSource:
    """Return the WeNet source that data preparation uses, after checking its lists and archives."""
    audio_root = None if root is None else str(root)
    listed = _ListSource(
        data_list=_as_texts(files),
        data_type=cast("Any", kind),
        audio_root=audio_root,
        allow_pipe=allow_pipe,
        **options,
    )
    source = listed.with_cache(cache)
    source.check()
    return source


def _as_texts(files: Paths) -> list[str]:
    return [str(files)] if isinstance(files, (str, Path)) else [str(file) for file in files]
