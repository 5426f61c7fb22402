"""Sources of a chain, as the shards that our reader divides among ranks and workers, shuffles and resumes.

A file of a list is a shard, or each archive that a list names. What cannot be read is an example whose value is an
error: the chain raises it, or leaves the example out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np

from sharmill.audio.fetch import is_url
from sharmill.audio.files import open_audio
from sharmill.audio.roots import AudioRoots
from sharmill.errors import ConfigError, DamagedShard, RejectRecord
from sharmill.files.storage import checksum_bytes
from sharmill.shar.reading.shard import POSITION
from sharmill.shar.reading.shard_source import ShardSource
from sharmill.sources.files import find_files, open_input, read_ends
from sharmill.sources.lines import iterate_checked
from sharmill.sources.tars import Archive, TarDamage, TarMember, TarSample, read_part
from sharmill.sources.wenet import WenetSource

Paths = str | Path | Sequence[str | Path]

# A member is read as a whole. This is nine hours of speech at 16 kHz.
_MAX_MEMBER_BYTES: Final = 1 << 30
# Read at both ends of a file, to tell it from another one of its size.
_BLOCK: Final = 4096


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

    @classmethod
    def at(cls, name: str, position: tuple[int, ...], value: Any) -> Example:
        """Make the example of one place."""
        return cls(value, (Origin(name, {POSITION: position}),))


class Items(ShardSource):
    """Any iterable that can be read again; of one without random access, every reader passes over what is others'."""

    def __init__(self, items: Iterable[Any]) -> None:
        if isinstance(items, (str, bytes)):
            raise ConfigError(
                f"a chain begins with RawList, ShardList, TextLines or the items themselves, not with {items!r}",
                code="bad_config_value",
            )
        if isinstance(items, Iterator):
            raise ConfigError(
                "an iterator can be read once only, and a chain reads its source in every epoch: give a list, or an "
                "object whose __iter__ begins anew",
                code="bad_config_value",
            )
        self._items = items
        self.sequential = not isinstance(items, Sequence)
        self._count: int | None = None

    @property
    def num_shards(self) -> int:
        return 1

    @property
    def identity(self) -> dict[str, Any]:
        """The number of items: of other ones, as many, a state is taken as well."""
        return {"items": self.count(0)}

    def count(self, shard: int) -> int:
        """Return the length; without one, the items are counted."""
        if self._count is None:
            try:
                self._count = len(self._items)  # type: ignore[arg-type]
            except TypeError:
                self._count = sum(1 for _ in self._items)
        return self._count

    def open(self, shard: int, epoch: int) -> _ItemShard:
        return _ItemShard(self._items)


class _ItemShard:
    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items
        self._iterator = iter(()) if isinstance(items, Sequence) else enumerate(items)

    def read(self, number: int, position: tuple[int, ...]) -> Example | None:
        if isinstance(self._items, Sequence):
            return Example.at(f"item {number}", position, self._items[number])
        for found, item in self._iterator:
            if found == number:
                return Example.at(f"item {number}", position, item)
        return None

    def close(self) -> None:
        self._iterator = iter(())


class _LineFiles(ShardSource):
    """Lines of files that are not blank, 8 bytes of memory for each."""

    def __init__(self, files: Sequence[Path], parse: Callable[[str, bytes], Any]) -> None:
        self._files = files
        self._parse = parse
        self._ends: dict[int, np.ndarray] = {}

    @property
    def num_shards(self) -> int:
        return len(self._files)

    @property
    def identity(self) -> dict[str, Any]:
        """The names, sizes, begins and ends of the files; what was changed between these is not noticed."""
        return {"files": checksum_bytes(msgspec.json.encode([_evidence(file) for file in self._files]))}

    def count(self, shard: int) -> int:
        return len(self._ends_of(shard))

    def open(self, shard: int, epoch: int) -> _LineShard:
        return _LineShard(self._files[shard], self._ends_of(shard), self._parse)

    def _ends_of(self, shard: int) -> np.ndarray:
        """Return the end of each line (lines,); between two of them is a line, and perhaps blank ones before it."""
        if shard not in self._ends:
            ends = (end for end, _ in iterate_checked(self._files[shard], "list"))
            self._ends[shard] = np.fromiter(ends, np.int64)
        return self._ends[shard]


def _evidence(path: Path) -> tuple[str, int, str]:
    """Return the name of a file, its size, and a checksum of its first and last block."""
    with open_input(path, "list") as stream:
        size = os.fstat(stream.fileno()).st_size
        ends = os.pread(stream.fileno(), _BLOCK, 0) + os.pread(stream.fileno(), _BLOCK, max(0, size - _BLOCK))
    return path.name, size, checksum_bytes(ends)


class _LineShard:
    def __init__(self, path: Path, ends: np.ndarray, parse: Callable[[str, bytes], Any]) -> None:
        self._path, self._ends, self._parse = path, ends, parse
        self._stream = open_input(path, "list")

    def read(self, number: int, position: tuple[int, ...]) -> Example:
        start, end = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
        name = f"{self._path}, record {number + 1}"
        line = os.pread(self._stream.fileno(), end - start, start).strip()
        try:
            value = self._parse(f"{self._path.name}:{number + 1}", line)
        except RejectRecord as reject:
            value = DamagedShard(f"{name}: {reject.detail}")
        return Example.at(name, position, value)

    def close(self) -> None:
        self._stream.close()


class TextLines(_LineFiles):
    """Lines of text: ``{"key": "books.txt:12", "txt": "..."}``; blank ones are left out, and not counted.

    Args:
        files: one path or several, with ranges such as ``{0..9}``, ``*`` and ``?``.
    """

    def __init__(self, files: Paths) -> None:
        found = find_files(_as_texts(files))
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

    ``wav`` becomes the path of the file; ``decode_wav`` opens it, and takes the part from ``start`` to ``end`` seconds
    where the line has these.

    Args:
        files: one path or several, with ranges such as ``{0..9}``, ``*`` and ``?``.
        audio_root: the folder that ``wav`` must lie below; by default absolute paths may lie anywhere.
    """

    def __init__(self, files: Paths, audio_root: str | Path | None = None) -> None:
        source = _wenet("raw", files, audio_root)
        self._roots = AudioRoots.of([source.audio_root])
        super().__init__(source.files, self._parse_record)

    def _parse_record(self, _: str, line: bytes) -> dict[str, Any]:
        try:
            record = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.ValidationError as error:
            raise RejectRecord("malformed", "the line is not a JSON object") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RejectRecord("malformed", f"the line is not JSON: {error}") from error
        for name in ("key", "wav", "txt"):
            if not isinstance(record.get(name, "" if name == "txt" else None), str):
                raise RejectRecord("missing_field", f"the line has no text as {name!r}")
        start, end = record.get("start", 0), record.get("end")
        if type(start) not in (int, float) or not (end is None or (type(end) in (int, float) and 0 <= start < end)):
            raise RejectRecord("malformed", "start and end are not times in seconds of which end is later")
        number, relative = self._roots.place(0, record["wav"])
        return record | {"wav": str(self._roots.roots[number].path / relative)}


class ShardList(ShardSource):
    """WeNet's ``shard`` lists: lines with the path of a tar, whose members belong together by their name's begin.

    The key is the name up to its last dot.

    An example has ``key``, the audio's bytes as ``wav``, the text as ``txt`` where there is one, and the bytes of every
    further member by the end of its name. A sample with two members of one name, or with a key that the archive had
    before, without audio or with several, or at which the archive is damaged, is an error.

    Args:
        files: one path or several, with ranges such as ``{0..9}``, ``*`` and ``?``.
        root: the folder that the archives must lie below; by default absolute paths may lie anywhere.
        encoding: of the texts.
    """

    def __init__(self, files: Paths, root: str | Path | None = None, encoding: str = "utf-8") -> None:
        source = _wenet("shard", files, root, encoding=encoding)
        self._archives, self._samples, self._encoding = source.archives, source.samples, encoding
        self._counts: dict[int, int] = {}

    @property
    def num_shards(self) -> int:
        return len(self._archives)

    @property
    def identity(self) -> dict[str, Any]:
        """The names and sizes of the archives, which may be many on a slow disk; other content is not noticed."""
        paths = [archive.path for archive in self._archives]
        sizes = [(path.name, path.stat().st_size if path.is_file() else None) for path in paths]
        return {"archives": checksum_bytes(msgspec.json.encode(sizes))}

    def count(self, shard: int) -> int:
        """Return the number of samples, of which the headers tell, and of damages."""
        if shard not in self._counts:
            self._counts[shard] = sum(1 for _ in self._samples.items(shard))
        return self._counts[shard]

    def open(self, shard: int, epoch: int) -> _TarShard:
        items = list(self._samples.items(shard))
        return _TarShard(self._archives[shard], items, self._samples.audio_of, self._encoding)


class _TarShard:
    def __init__(
        self,
        archive: Archive,
        items: Sequence[TarSample | TarDamage],
        audio_of: Callable[[TarSample], TarMember],
        encoding: str,
    ) -> None:
        self._path, self._items, self._audio_of, self._encoding = archive.path, items, audio_of, encoding
        self._first: dict[str, int] = {}
        for number, item in enumerate(items):
            if isinstance(item, TarSample):
                self._first.setdefault(item.key, number)
        self._stream: BinaryIO | None = None

    def read(self, number: int, position: tuple[int, ...]) -> Example:
        if number >= len(self._items):
            return Example.at(str(self._path), position, DamagedShard(f"{self._path} was changed while it was read"))
        item = self._items[number]
        if isinstance(item, TarDamage):
            return Example.at(str(self._path), position, DamagedShard(f"{self._path}: {item.sentence}"))
        name = f"{self._path}, {item.key[:200]!r}"
        try:
            value: Any = self._value(item, is_first=self._first[item.key] == number)
        except RejectRecord as reject:
            value = DamagedShard(f"{name}: {reject.detail}")
        return Example.at(name, position, value)

    def _value(self, sample: TarSample, *, is_first: bool) -> dict[str, Any]:
        if not is_first:
            raise RejectRecord("ambiguous_audio", "the archive has an earlier sample of this key")
        audio = self._audio_of(sample)
        self._stream = self._stream or open_audio(self._path)
        value: dict[str, Any] = {}
        for suffix, member in sample.members:
            data = read_part(self._stream, member, _MAX_MEMBER_BYTES)
            value["wav" if member is audio else suffix] = self._text(data) if suffix == "txt" else data
        return value | {"key": sample.key}

    def _text(self, data: bytes) -> str:
        try:
            return data.decode(self._encoding).removeprefix("\ufeff").strip()
        except UnicodeDecodeError as error:
            raise RejectRecord("malformed", f"the text is not {self._encoding}: set encoding of the list") from error

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def _wenet(kind: str, files: Paths, root: str | Path | None, **options: Any) -> WenetSource:
    """Return the source of the preparation, which checks lists and archives."""
    if root is not None and is_url(str(root)):
        raise ConfigError(f"{root} is an address: copy the audio to a folder", code="bad_config_value")
    audio_root = None if root is None else str(root)
    source = WenetSource(data_list=_as_texts(files), data_type=kind, audio_root=audio_root, **options)  # type: ignore[arg-type]
    source.check()
    return source


def _as_texts(files: Paths) -> list[str]:
    return [str(files)] if isinstance(files, (str, Path)) else [str(file) for file in files]
