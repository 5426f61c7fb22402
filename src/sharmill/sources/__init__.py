"""Input formats: each module turns one kind of manifest into raw records, in pieces that can be read in parallel.

A source is a dataclass whose fields are the keys of its entry under ``sources`` in a configuration. A package adds one
by an entry point in the group ``sharmill.sources``, or a configuration names it: ``type: python:package.module:Class``.

>>> import json
>>> from dataclasses import dataclass
>>> from pathlib import Path
>>> @dataclass(frozen=True, kw_only=True)
... class WavSource(Source):
...     type: str = "wav"
...     suffix: str = ".wav"
...
...     def identity(self):
...         return {path.name: path.stat().st_size for path in self._files()}
...
...     def pieces(self, records_per_piece):
...         for path in self._files():
...             yield Piece(1, {"name": path.name})
...
...     def read(self, piece):
...         yield json.dumps({"audio_filepath": piece["name"]}).encode()
...
...     def _files(self):
...         return sorted(Path(self.audio_root).glob(f"*{self.suffix}"))
>>> WavSource(audio_root="recordings", speaker="{path[0]:prefix}", language="en").type
'wav'
"""

import copy
import dataclasses
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Final, Self

import msgspec

from sharmill.audio.roots import AudioRoot, normalise_path
from sharmill.config import require
from sharmill.errors import ConfigError, RejectRecord, refuse
from sharmill.files.cache import Cache
from sharmill.files.location import Location, RemoteLocation, check_url, is_url
from sharmill.manifest import Channel, Member
from sharmill.registry import nearest
from sharmill.sources.files import (
    Digest,
    expand_home,
    expand_shards,
    find_files,
    identify_files,
    iterate_stream,
    names_several,
    open_lines,
    unpacked_name,
)
from sharmill.sources.speakers import UNDETERMINED, SpeakerRule, Template

# So many records are looked at before any work to see which keys there are.
_FIRST_RECORDS: Final = 1000


@dataclass(frozen=True)
class Piece:
    """A run of records that one unit of ``prepare`` reads; ``params`` is JSON-encodable, for its source alone."""

    num_records: int
    params: dict[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """A record that a source cannot read: the reason and the sentence of its reject, and what there is of it."""

    reason: str
    detail: str
    record: str


@dataclass(frozen=True)
class Described:
    """A raw record with facts about it: the place of its audio in a container file, such as a tar archive, or notes.

    Attributes:
        record: one JSON text, as of any record. If its audio lies in a container, ``audio_filepath`` is the name of
            the audio: the path of the container relative to the audio root, and behind it the name in the container:
            ``shard.tar/member.wav`` or ``table.parquet#7``. Ids follow from it.
        member: where the audio is to be found; None if ``audio_filepath`` names a file.
        notes: sentences without their subject's number, such as "captions are left out", and these numbers.
    """

    record: bytes
    member: Member | None = None
    notes: Mapping[str, int] = dataclasses.field(default_factory=dict)


# A raw record as a source yields it.
RawRecord = bytes | Described | Unreadable


def record_text(raw: RawRecord) -> bytes:
    """Return the JSON text of a raw record, or what there is of one that cannot be read."""
    return raw if isinstance(raw, bytes) else raw.record if isinstance(raw, Described) else raw.record.encode()


def notes_of(raw: RawRecord) -> Mapping[str, int]:
    """Return the notes of a raw record."""
    return raw.notes if isinstance(raw, Described) else {}


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """One input of a dataset, with the keys that every source has.

    A subclass is such a dataclass with further keys.

    Attributes:
        file_keys: the keys that name files or folders of records. Manifests are called after the first that is given.
        folder_keys: further keys that name folders.
        cache: where what URLs name is copied to; that of the run where a configuration has the source.
    """

    file_keys: ClassVar[tuple[str, ...]] = ()
    folder_keys: ClassVar[tuple[str, ...]] = ()
    cache: ClassVar[Cache] = Cache.at(None)
    type: str
    """Kind of the source: ``nemo``, one that another package declares, or ``python:package.module:Class``."""
    audio_root: str | list[str] | None
    """Folder that ``audio_filepath`` is relative to, or a list of them. Audio outside is rejected. ``null`` takes
    absolute paths anywhere, so a manifest can then name any audio file. Audio below a URL (``https://``, ``s3://``,
    ``gs://``, ``ais://``) is copied."""
    speaker: str | None = None
    """Template that makes the name of the speaker of keys and of parts of the path, such as ``{spk}``, ``{path[0]}``,
    ``{utt:prefix}`` (up to the first ``-`` or ``_``), ``{utt[1]}``. ``null`` takes the record's ``speaker``: a tag, or
    a name."""
    language: str | None = None
    """Language of records that have neither a speaker tag nor ``language`` or ``lang``; ``null`` is ``und``."""
    dataset: str | None = None
    """Name for the speaker tags of records that have none; ``null`` is the name of the dataset."""
    channel: Channel = None
    """Channel of audio that has several, from 0, or ``downmix`` for their mean. A record's own ``channel`` comes first.
    ``null`` rejects such audio where the record has none."""
    float_scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Full scale of audio files that hold floats: 32768 if these are the values of 16-bit integers, 8388608 of 24 bits,
    2147483648 of 32 bits. The samples of such files are divided by it; other files are not changed."""

    def __post_init__(self) -> None:
        for key in ("audio_root", *self.file_keys):
            hint = "; audio_root: null takes absolute paths anywhere" if key == "audio_root" else ""
            is_full = getattr(self, key) is None or all(path.strip() for path in self.named(key) or [""])
            require(is_full, f"{key} must not be empty{hint}")
            for url in filter(is_url, self.named(key)):
                check_url(url, key)
        for key in ("language", "dataset"):
            value = getattr(self, key)
            require(value is None or value.split() == [value], f"{key} {value!r} must be a word without blanks")
        require(not isinstance(self.channel, int) or self.channel >= 0, "channel must be a number from 0, or downmix")
        self.template()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without cached properties, such as open files, which each process has for itself."""
        members = {name: member for kind in reversed(type(self).__mro__) for name, member in vars(kind).items()}
        return {key: v for key, v in self.__dict__.items() if not isinstance(members.get(key), cached_property)}

    def check(self) -> None:  # noqa: B027 (some sources can be checked only by reading them)
        """Raise ConfigError where the input as a whole cannot be used; read little of it."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return files with their sizes and checksums, for the plan's identity.

        A run goes on only where it is the same, names included: names relative to the source let a project be moved.
        """

    @abstractmethod
    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield the pieces in the order of the input.

        Raises:
            ConfigError: the input as a whole cannot be used.
        """

    @abstractmethod
    def read(self, piece: dict[str, Any]) -> Iterator[RawRecord]:
        """Yield the raw records of a piece, one JSON text each; ``piece`` is the piece's ``params``."""

    def records(self) -> Iterator[RawRecord]:
        """Yield the raw records of all pieces."""
        for piece in self.pieces(_FIRST_RECORDS):
            yield from self.read(piece.params)

    def with_cache(self, cache: Cache) -> Self:
        """Return a copy of the source that copies what URLs name into a cache."""
        source = copy.copy(self)
        object.__setattr__(source, "cache", cache)
        return source

    def path_of(self, name: str) -> Location:
        """Return the location of a file or folder that a key names."""
        return RemoteLocation(name, self.cache) if is_url(name) else expand_home(name)

    def named(self, key: str) -> list[str]:
        """Return the paths, patterns or URLs under a key; none where it is not given."""
        value = getattr(self, key)
        return [] if value is None else value if isinstance(value, list) else [value]

    @property
    def stem(self) -> str | None:
        """The name of the manifests made from this source alone; None for the name of the dataset."""
        named = next((value for key in self.file_keys if (value := getattr(self, key)) is not None), None)
        if not isinstance(named, str) or names_several(named):
            return None
        return Path(unpacked_name(named)).stem

    @property
    def keeps_ids(self) -> bool:
        """True if records have the ids of their cuts under ``SOURCE_CUT_ID``, to be those of the dataset.

        A source whose records can have them has a key ``keep_ids``.
        """
        return getattr(self, "keep_ids", False)

    def paths(self) -> dict[str, str]:
        """Return the paths that keys name, those of a list under ``key[number]``, without URLs."""
        found: dict[str, str] = {}
        for key in (*self.file_keys, *self.folder_keys, "audio_root"):
            value = getattr(self, key)
            named = {f"{key}[{n}]": path for n, path in enumerate(value)} if isinstance(value, list) else {key: value}
            found |= {name: str(expand_home(path)) for name, path in named.items() if path and not is_url(path)}
        return found

    def settings(self) -> dict[str, Any]:
        """Return the keys but those of folders, for the plan's identity; of files their names only."""
        found = dataclasses.asdict(self)
        for key in ("audio_root", *self.folder_keys):
            del found[key]
        for key in self.file_keys:
            value = found[key]
            found[key] = [Path(path).name for path in value] if isinstance(value, list) else value and Path(value).name
        return found

    def refuse_url_roots(self) -> None:
        """Raise ValueError where an audio root is a URL, as a source does that looks into the folder itself."""
        is_local = not any(map(is_url, self.named("audio_root")))
        require(is_local, f"audio_root of {self.type} is a folder to look into, and cannot be a URL")

    def template(self) -> Template | None:
        """Return the template of ``speaker``; raise ValueError where it is none."""
        return None if self.speaker is None else Template(self.speaker)

    def speaker_rule(self, dataset: str) -> SpeakerRule:
        """Return the rule that makes speaker tags; ``dataset`` is the name of the dataset."""
        return SpeakerRule(self.template(), self.language or UNDETERMINED, self.dataset or dataset)

    def needed_keys(self) -> dict[str, tuple[str, str]]:
        """Return keys that some record must have, each with its name in the input and with what takes that."""
        template = self.template()
        keys = [] if template is None else template.keys
        return {key: (key, f"the speaker template {self.speaker!r} takes the key {key!r}") for key in keys}

    def check_keys(self) -> None:
        """Raise ConfigError if a key that the configuration names is in none of the first records."""
        needed = self.needed_keys()
        if not needed:
            return
        known: dict[str, None] = {}
        for raw in itertools.islice(self.records(), _FIRST_RECORDS):
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                if not isinstance(raw, Unreadable):
                    known |= dict.fromkeys(msgspec.json.decode(record_text(raw), type=dict[str, Any]))
        refuse(
            *(
                (
                    known and key not in known,
                    f"{taken}, which none of the first {_FIRST_RECORDS} records has{nearest(name, list(known))}",
                )
                for key, (name, taken) in needed.items()
            ),
            code="unknown_key",
        )


@dataclass(frozen=True, kw_only=True)
class FileSource(Source):
    """A source of files that paths and patterns under ``file_keys`` name.

    Attributes:
        digests: what of the files of a key is read for the identity, where that is not all of them.
    """

    digests: ClassVar[dict[str, Digest]] = {}

    def find(self, key: str) -> list[Location]:
        """Return the files that a key names, in order."""
        return find_files(self.named(key), self.cache)

    @property
    def file_key(self) -> str:
        """The first key that is given; its files have the records."""
        return next(filter(self.named, self.file_keys))

    @cached_property
    def files(self) -> list[Location]:
        """The files of the first key that is given."""
        return self.find(self.file_key)

    def identity(self) -> dict[str, Any]:
        """Return the size and checksum of every file, by its key, number and name; also prove that each can be read."""
        self.check()
        keys = [key for key in self.file_keys if self.named(key)]
        return {key: identify_files(self.find(key), self.digests.get(key, "whole")) for key in keys}


@dataclass(frozen=True, kw_only=True)
class EncodedSource(Source):
    """A source of texts in an encoding of its own."""

    encoding: str = "utf-8"
    """Encoding of the texts, such as ``latin-1``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            newline = "\n".encode(self.encoding)
        except LookupError as error:
            raise ValueError(f"there is no encoding {self.encoding!r} of texts") from error
        require(newline == b"\n", f"texts in {self.encoding} cannot be read: save them as UTF-8")


@dataclass(frozen=True, kw_only=True)
class ColumnSource(Source):
    """A source whose records have the values of named columns.

    Attributes:
        checks_columns: True if ``check`` finds out which columns there are, of which the first records may have none.
    """

    checks_columns: ClassVar[bool] = False
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """Keys of records and the columns they come from: ``{text: sentence}``, ``{text: texts.0}``. Others keep theirs."""

    @property
    def mapped(self) -> set[str]:
        """The names that are keys of records or columns for other keys."""
        return {*self.columns, *self.columns.values()}

    def name_keys(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of columns by the keys of a record."""
        mapped = self.mapped
        kept = {column: value for column, value in values.items() if column not in mapped}
        found = {key: find_value(values, column) for key, column in self.columns.items()}
        return kept | {key: value for key, value in found.items() if value is not ...}

    def needed_keys(self) -> dict[str, tuple[str, str]]:
        """Return keys that some record must have, each with its name in the input and with what takes that."""
        columns = {} if self.checks_columns else self.columns
        taken = {key: (column, f"columns.{key} takes {column!r}") for key, column in columns.items()}
        return taken | super().needed_keys()


def find_value(values: Any, path: str) -> Any:
    """Return the value of a key, or of a path of keys and numbers such as ``texts.0``; an ellipsis if there is none.

    >>> find_value({"texts": ["Yes.", "yes"], "a.b": 1}, "texts.1"), find_value({"a.b": 1}, "a.b")
    ('yes', 1)
    """
    if isinstance(values, list):
        values = {str(number): value for number, value in enumerate(values)}
    if not isinstance(values, Mapping):
        return ...
    if path in values:
        return values[path]
    first, _, rest = path.partition(".")
    return find_value(values[first], rest) if rest and first in values else ...


@dataclass(frozen=True, kw_only=True)
class RunSource(Source):
    """A source whose input is a list of runs of entries, such as lines of a file or files of a folder.

    Pieces are made of whole runs, and of parts of a run that is larger than a piece. An entry has one record.
    """

    @abstractmethod
    def runs(self, size: int) -> Iterator[tuple[list[Any], int]]:
        """Yield the place of each run, as JSON values, and its number of entries: about ``size`` where that is free.

        Raises:
            ConfigError: the input as a whole cannot be used.
        """

    @abstractmethod
    def entries(self, place: list[Any], begin: int, end: int) -> Iterator[Any]:
        """Yield the entries ``begin`` to ``end`` of a run; an Unreadable stands for one that cannot be read."""

    def record(self, entry: Any) -> RawRecord:
        """Return the record of an entry, by default the entry itself; raise RejectRecord where it has none."""
        return entry

    def shown(self, entry: Any) -> str:
        """Return the text of an entry that its reject shows."""
        return entry.decode("utf-8", "replace")

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of entries, each found again by its place."""
        spans: list[Any] = []
        total = 0
        for place, count in self.runs(records_per_piece):
            if total and total + count > records_per_piece >= count:
                yield Piece(total, {"spans": spans})
                spans, total = [], 0
            begin = 0
            while (end := begin + records_per_piece - total) < count:
                yield Piece(records_per_piece, {"spans": [*spans, [place, begin, end]]})
                spans, total, begin = [], 0, end
            if count:
                spans.append([place, begin, count])
                total += count - begin
        if total:
            yield Piece(total, {"spans": spans})

    def read(self, piece: dict[str, Any]) -> Iterator[RawRecord]:
        """Yield the records of a piece."""
        for span in piece["spans"]:
            for entry in self.entries(*span):
                try:
                    yield entry if isinstance(entry, Unreadable) else self.record(entry)
                except RejectRecord as reject:
                    yield Unreadable(reject.reason, reject.detail, self.shown(entry))


@dataclass(frozen=True, kw_only=True)
class LineSource(RunSource, FileSource):
    """A source of files of lines, plain or compressed. Lines that are blank have no records."""

    def runs(self, size: int) -> Iterator[tuple[list[Any], int]]:
        """Yield runs of lines, each found again by its file and the place of its first line."""
        # Files by their numbers: they may have been moved, with their project, when they are read.
        for number in range(len(self.files)):
            begin = end = count = 0
            for behind, line in self.lines(number):
                in_line = len(self.split_line(line))
                if count and count + in_line > size:
                    yield [number, begin], count
                    begin, count = end, 0
                end, count = behind, count + in_line
            if count:
                yield [number, begin], count

    def entries(self, place: list[Any], begin: int, end: int) -> Iterator[Any]:
        """Yield what the lines of a run have."""
        lines = itertools.chain.from_iterable(self.split_line(line) for _, line in self.lines(*place))
        return itertools.islice(lines, begin, end)

    def split_line(self, line: Any) -> Sequence[Any]:
        """Return the entries of a line; by default it is one itself."""
        return (line,)

    def lines(self, number: int, begin: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield the lines of a file from a place on, each with the place behind it; ConfigError where it is damaged."""
        # Pieces may be read while further ones are looked for, which begins at the first line.
        stream = self._open(self.files[number]) if begin else open_lines(self.files[number])
        stream.seek(begin)
        return iterate_stream(stream, self.files[number], self.file_key, begin)

    @cached_property
    def _open(self) -> Callable[[Location], BinaryIO]:
        """The last file stays open: if it is compressed, only an earlier place unpacks it from its begin again."""
        return lru_cache(maxsize=1)(open_lines)


@dataclass(frozen=True, kw_only=True)
class ContainerSource(FileSource):
    """A source of files that hold the audio itself, such as tar archives; the last of ``file_keys`` names them."""

    audio_root: str | None = None
    """Folder below which names and ids begin; ``null`` is the one that all files lie in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.audio_root is None:
            folders = []
            # However many files the patterns find.
            for pattern in self.named(self.file_keys[-1]):
                names = expand_shards(re.split(r"[*?]", str(self.path_of(pattern)))[0])
                folders += [os.path.dirname(name) or "." for name in (names[0], names[-1])]  # noqa: PTH120
            # commonpath takes the double slash of a URL away.
            common = re.sub(r"^([a-z0-9]+):/", r"\1://", os.path.commonpath(folders))
            object.__setattr__(self, "audio_root", common or ".")

    def container(self, file: Location) -> str:
        """Return the path of a file relative to the audio root, as ``Member.container`` and names of audio have it.

        Raises:
            ConfigError: it lies elsewhere.
        """
        root = AudioRoot.of(self.audio_root)
        try:
            return normalise_path(str(file.absolute()), root.names)
        except RejectRecord as error:
            raise ConfigError(
                f"{file} does not lie below the audio root {self.audio_root}; leave audio_root out, or name a folder "
                "above all files",
                code="bad_config_value",
            ) from error
