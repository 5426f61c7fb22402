"""Sources of a chain, as the shards that our reader divides among ranks and workers, shuffles and resumes.

A file of a list is a shard, or each archive that a list names. What cannot be read is an example whose value is an
error: the chain raises it, or leaves the example out.
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

# A member is read as a whole. This is nine hours of speech at 16 kHz.
_MAX_MEMBER_BYTES: Final = 1 << 30
# The most items of a source without a length: the positions of more would only be memory.
_MOST_ITEMS: Final = 1 << 24
# Read at both ends of a file, to tell it from another one of its size.
_BLOCK: Final = 4096
# Hashes of the processes, caches and URLs of which a server was asked for the version; texts would be long.
_asked: Final[set[int]] = set()
# With the number of a process, which may come again, a name that no later one has.
_STARTED: Final = os.urandom(16).hex()
_record_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(slots=True)
class Origin:
    """The place that an example came from.

    Attributes:
        name: what errors call it.
        custom: its position, where ``SharReader.mark_consumed`` looks for it.
        source: which of the sources of a chain it is from, set by the chain.
    """

    name: str
    custom: dict[str, tuple[int, ...]]
    source: Any = None


@dataclass(slots=True)
class Example:
    """A value that a chain hands from step to step, or the error in place of one, and the places that it came from."""

    value: Any
    origins: tuple[Origin, ...]


@dataclass
class _Shard:
    """An open shard, of whose examples any may be an error.

    Attributes:
        name_of: what errors call an example.
        read_value: reads it; raises RejectRecord. It refers to the open file, which closes with the last reference.
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
    """Any iterable; of one without random access, every reader passes over what is others'.

    Args:
        items: an iterator is read here. A function is called here to count what it returns, and by each reader in each
            epoch.
    """

    num_shards = 1

    def __init__(self, items: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        refuse(
            (isinstance(items, (str, bytes)),
             "a chain begins with RawList, ShardList, TextLines or the items themselves, not with a name"),
            (not callable(items) and not hasattr(items, "__iter__") and not hasattr(items, "__getitem__"),
             f"a chain begins with an iterable, or a function that returns one, not with {items!r}"),
        )  # fmt: skip
        self._is_function = callable(items) and not isinstance(items, Iterable)
        self._items: Any = list(_not_too_many(items)) if isinstance(items, Iterator) else items
        found = self._begin()
        self.sequential = not isinstance(found, Sequence)
        # Here, and not by each worker process.
        try:
            self._count = len(found)  # type: ignore[arg-type]  # where it has no length
        except TypeError:
            self._count = sum(1 for _ in _not_too_many(found))

    @property
    def identity(self) -> dict[str, Any]:
        """The number of items: of other ones, as many, a state is taken as well."""
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
                # Whoever reads the last item looks for further ones.
                if place == number and (number < self._count - 1 or not any(True for _ in items)):
                    return item
            raise RejectRecord("malformed", f"the source no longer has the {self._count} items that it had at first")

        return _Shard("item {}".format, take)


def _not_too_many(items: Iterable[Any]) -> Iterator[Any]:
    """Yield items; raise ConfigError where they may be without end."""
    left = iter(items)
    yield from islice(left, _MOST_ITEMS)
    refuse((any(True for _ in left), f"a source has more than {_MOST_ITEMS} items: give a sequence, or TextLines"))


class _Command:
    """A client that runs commands, ``pipe:ais get ...``, and takes what they print for the content of a file."""

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
    """Copies of what a list of WeNet names, to which the user's own call may let commands belong.

    A process asks a server once whether a copy is of the present version, and uses no copy of what a command gave to
    another process.
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
class _Listed(WenetSource):
    """A list of WeNet as a chain reads it: without a root its lines may name URLs and, where allowed, commands."""

    allow_pipe: bool = False

    def locate(self, roots: AudioRoots, text: str) -> Archive:
        file = self.remote(text)
        return super().locate(roots, text) if file is None else Archive(file, text, text)

    def remote(self, text: str) -> Location | None:
        """Return what a line names as a URL or by a command; None for a path."""
        is_command = text.startswith("pipe:") or text.rstrip().endswith("|")
        if is_command and not self.allow_pipe:
            raise RejectRecord("outside_root", f"{text!r} names a command, which runs only with allow_pipe=True")
        anywhere = self.audio_root is None and is_url(text)
        return RemoteLocation(text, self.cache) if is_command or anywhere else None


class _LineFiles(ShardSource):
    """Lines of files that are not blank, 8 bytes of memory for each."""

    def __init__(self, files: Sequence[Location], parse: Callable[[str, bytes], Any]) -> None:
        self._files, self.num_shards = files, len(files)
        self._parse = parse
        self._ends: dict[int, np.ndarray] = {}

    @property
    def identity(self) -> dict[str, Any]:
        """The names, sizes, begins and ends of the files; what was changed between these is not noticed."""
        return {"files": checksum_bytes(msgspec.json.encode([_evidence(file) for file in self._files]))}

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
        """Return the end of each line (lines,); between two of them is a line, and perhaps blank ones before it."""
        if shard not in self._ends:
            ends = (end for end, _ in iterate_lines(self._files[shard], "list"))
            self._ends[shard] = np.fromiter(ends, np.int64)
        return self._ends[shard]


def _evidence(path: Location) -> tuple[str, int, str]:
    """Return the name of a file, its size, and a checksum of its first and last block."""
    with open_input(path, "list") as stream:
        size = os.fstat(stream.fileno()).st_size
        ends = os.pread(stream.fileno(), _BLOCK, 0) + os.pread(stream.fileno(), _BLOCK, max(0, size - _BLOCK))
    return path.name, size, checksum_bytes(ends)


class TextLines(_LineFiles):
    """Lines of text: ``{"key": "books.txt:12", "txt": "..."}``; blank ones are left out, and not counted.

    Args:
        files: one path or several, with ranges such as ``{0..9}``, ``*`` and ``?``.
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
    """WeNet's ``raw`` lists: lines of JSON with ``key``, ``wav`` and, but for inference, ``txt``; other keys are kept.

    ``wav`` becomes the path of the file, or the bytes that a URL has. ``decode_wav`` takes the part from ``start`` to
    ``end`` seconds of it, where the line has these.

    Args:
        files: one path or several, with ranges such as ``{0..9}``, ``*`` and ``?``.
        audio_root: the folder, or the URL, that ``wav`` must lie below; by default absolute paths and URLs may lie
            anywhere.
        allow_pipe: run the commands that ``wav`` names, ``pipe:ais get ...``; else such a line is an error.
        cache_dir: the folder for copies of what URLs and commands give; by default the user's cache.
        cache_gib: its limit.
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
                raise RejectRecord("missing_field", f"the line has no text as {name!r}")
        start, end = record.get("start", 0), record.get("end")
        if type(start) not in (int, float) or not (end is None or (type(end) in (int, float) and 0 <= start < end)):
            raise RejectRecord("malformed", "start and end are not times in seconds of which end is later")
        file = self._source.remote(record["wav"]) or self._roots.path_of(*self._roots.place(0, record["wav"]))
        return record | {"wav": local(file).read_bytes() if is_remote(file) else str(file)}


class ShardList(ShardSource):
    """WeNet's ``shard`` lists: lines with the path of a tar, whose members belong together by their name's begin.

    The key is the name up to its last dot.

    An example has ``key``, the audio's bytes as ``wav``, the text as ``txt`` where there is one, and the bytes of every
    further member by the end of its name. A sample with two members of one name, or with a key that the archive had
    before, without audio or with several, or at which the archive is damaged, is an error.

    Args:
        files: one path or several, with ranges such as ``{0..9}``, ``*`` and ``?``.
        root: the folder, or the URL, that the archives must lie below; by default absolute paths and URLs may lie
            anywhere.
        encoding: of the texts.
        allow_pipe: run the commands that lines are, ``pipe:ais get ...``; else such a line is an error.
        cache_dir: the folder for copies of what URLs and commands give; by default the user's cache.
        cache_gib: its limit.
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
        """The names and sizes of the archives, which may be many on a slow disk; other content is not noticed."""
        return {"archives": checksum_bytes(msgspec.json.encode(list(self._source.sizes())))}

    def count(self, shard: int) -> int:
        """Return the number of samples, of which the headers tell, and of damages."""
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
                raise RejectRecord("malformed", "the archive was changed while it was read")
            sample = items[number]
            if sample.damage is not None:
                raise RejectRecord("unreadable_audio", sample.damage.detail)
            if first[sample.key] != number:
                raise RejectRecord("ambiguous_audio", "the archive has an earlier sample of this key")
            audio = self._source.audio_of(sample)
            value: dict[str, Any] = {}
            for suffix, member in sample.members:
                data = read_part(open_archive(), member, _MAX_MEMBER_BYTES)
                text = decode_text(data, self._source.encoding, "the text").strip() if suffix == "txt" else None
                value["wav" if member is audio else suffix] = data if text is None else text
            return value | {"key": sample.key}

        return _Shard(name_of, read_sample)


def _wenet(kind: str, files: Paths, root: str | Path | None, allow_pipe: bool, cache: Cache, **options: Any) -> _Listed:
    """Return the source of the preparation, which checks lists and archives."""
    audio_root = None if root is None else str(root)
    listed = _Listed(
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
