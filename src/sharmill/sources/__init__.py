"""Input formats. Each module turns one kind of manifest into raw records, in pieces that can be read in parallel.

A source is a dataclass whose fields are the keys of an entry under ``sources`` in a configuration. Other packages can
add sources through the entry point group ``sharmill.sources``. A configuration can also name a class directly: ``type:
python:package.module:Class``.

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

# Number of records that are read before a run to find out which keys the input has.
_FIRST_RECORDS: Final = 1000


@dataclass(frozen=True)
class Piece:
    """Consecutive records for one unit of ``prepare``.

    Attributes:
        params: JSON values with which the source finds the records again.
    """

    num_records: int
    params: dict[str, Any]


@dataclass(frozen=True)
class UnreadableRecord:
    """A record that a source cannot read.

    Attributes:
        reason, detail: reason and message of the reject.
        record: the text of the record, as far as it could be read.
    """

    reason: str
    detail: str
    record: str


@dataclass(frozen=True)
class DescribedRecord:
    """A raw record with the location of its audio in a container file, such as a tar archive, or with notes.

    Attributes:
        record: the record as JSON text. If the audio is in a container, ``audio_filepath`` is the path of the container
            relative to the audio root, followed by the name in the container: ``shard.tar/member.wav`` or
            ``table.parquet#7``. Ids are derived from it.
        member: location of the audio in its container; None if ``audio_filepath`` names a file.
        notes: number of occurrences of each note. A note such as "captions are left out" is shown after this number.
    """

    record: bytes
    member: Member | None = None
    notes: Mapping[str, int] = dataclasses.field(default_factory=dict)


# The types of raw records that a source yields.
RawRecord = bytes | DescribedRecord | UnreadableRecord


def record_text(raw: RawRecord) -> bytes:
    """Return the JSON text of a raw record; for an unreadable record, return the text that could be read."""
    return raw if isinstance(raw, bytes) else raw.record if isinstance(raw, DescribedRecord) else raw.record.encode()


def notes_of(raw: RawRecord) -> Mapping[str, int]:
    """Return the notes of a raw record."""
    return raw.notes if isinstance(raw, DescribedRecord) else {}


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """One input of a dataset, with the keys that all sources share.

    A subclass is a dataclass that adds its own keys.

    Attributes:
        file_keys: keys that name files or folders with records. The manifests of a run are named after the file under
            the first of these keys that is set.
        folder_keys: further keys that name folders.
        cache: cache for files behind URLs. A source from a configuration uses the cache of the run.
    """

    file_keys: ClassVar[tuple[str, ...]] = ()
    folder_keys: ClassVar[tuple[str, ...]] = ()
    cache: ClassVar[Cache] = Cache.at(None)
    type: str
    """Kind of the source: ``nemo``, a kind from another package, or ``python:package.module:Class``."""
    audio_root: str | list[str] | None
    """Folder that ``audio_filepath`` is relative to, or a list of folders. Audio outside of them is rejected. ``null``
    accepts absolute paths anywhere. Audio below a URL (``https://``, ``s3://``, ``gs://``, ``ais://``) is copied."""
    speaker: str | None = None
    """Template for the speaker's name, with keys of the record and parts of the path, such as ``{spk}``, ``{path[0]}``,
    ``{utt:prefix}`` (up to the first ``-`` or ``_``), ``{utt[1]}``. ``null`` uses the record's ``speaker``, which is a
    tag or a name."""
    language: str | None = None
    """Language of records that have no speaker tag, ``language``, or ``lang``; ``null`` is ``und``."""
    dataset: str | None = None
    """Dataset name in speaker tags that are added to records without one; ``null`` is ``name`` of the configuration."""
    channel: Channel = None
    """Channel to use if audio has several: a number from 0, or ``downmix`` for their mean. A record's own ``channel``
    takes precedence. ``null`` rejects multi-channel audio if the record has no ``channel``."""
    float_scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Full scale of audio files that contain floats: 32768 if the values are 16-bit integers, 8388608 for 24 bits,
    2147483648 for 32 bits."""

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
        """Return the state without cached properties, such as open files, which every process must open itself."""
        members = {name: member for kind in reversed(type(self).__mro__) for name, member in vars(kind).items()}
        return {key: v for key, v in self.__dict__.items() if not isinstance(members.get(key), cached_property)}

    def check(self) -> None:  # noqa: B027 (some sources can be checked only by reading them)
        """Raise ConfigError if the input as a whole cannot be used; this reads only a little of the input."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the files with their sizes and checksums, for the plan's identity.

        A run can be resumed only if its identity, including file names, is unchanged. Keep names relative to the source
        so that a project can be moved.
        """

    @abstractmethod
    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield the pieces in the order of the input.

        Raises:
            ConfigError: the input as a whole cannot be used.
        """

    @abstractmethod
    def read(self, piece: dict[str, Any]) -> Iterator[RawRecord]:
        """Yield the raw records of a piece, each as one JSON text; ``piece`` is the ``params`` of the piece."""

    def records(self) -> Iterator[RawRecord]:
        """Yield the raw records of all pieces."""
        for piece in self.pieces(_FIRST_RECORDS):
            yield from self.read(piece.params)

    def with_cache(self, cache: Cache) -> Self:
        """Return a copy of the source that stores copies of files behind URLs in ``cache``."""
        source = copy.copy(self)
        object.__setattr__(source, "cache", cache)
        return source

    def path_of(self, name: str) -> Location:
        """Return the location of a file or folder that a key names."""
        return RemoteLocation(name, self.cache) if is_url(name) else expand_home(name)

    def named(self, key: str) -> list[str]:
        """Return the paths, patterns or URLs under a key; the list is empty if the key is not set."""
        value = getattr(self, key)
        return [] if value is None else value if isinstance(value, list) else [value]

    @property
    def stem(self) -> str | None:
        """The name of the manifests built from this source alone; None if they are named after the dataset."""
        named = next((value for key in self.file_keys if (value := getattr(self, key)) is not None), None)
        if not isinstance(named, str) or names_several(named):
            return None
        return Path(unpacked_name(named)).stem

    @property
    def keeps_ids(self) -> bool:
        """True if records have cut ids under ``SOURCE_CUT_ID``, and the dataset keeps these ids.

        Sources that support this have a key ``keep_ids``.
        """
        return getattr(self, "keep_ids", False)

    def paths(self) -> dict[str, str]:
        """Return the local paths of files and folders by key (``key[number]`` for the items of a list)."""
        found: dict[str, str] = {}
        for key in (*self.file_keys, *self.folder_keys, "audio_root"):
            value = getattr(self, key)
            named = {f"{key}[{n}]": path for n, path in enumerate(value)} if isinstance(value, list) else {key: value}
            found |= {name: str(expand_home(path)) for name, path in named.items() if path and not is_url(path)}
        return found

    def settings(self) -> dict[str, Any]:
        """Return the values of the keys for the plan's identity, without folders and with only the names of files."""
        found = dataclasses.asdict(self)
        for key in ("audio_root", *self.folder_keys):
            del found[key]
        for key in self.file_keys:
            value = found[key]
            found[key] = [Path(path).name for path in value] if isinstance(value, list) else value and Path(value).name
        return found

    def refuse_url_roots(self) -> None:
        """Raise ValueError if an audio root is a URL; called by sources that list the files of a folder."""
        is_local = not any(map(is_url, self.named("audio_root")))
        require(
            is_local,
            f"audio_root of {self.type} cannot be a URL, since its files have to be listed; name a local folder",
        )

    def template(self) -> Template | None:
        """Return the template of ``speaker``; raise ValueError if it is not a valid template."""
        return None if self.speaker is None else Template(self.speaker)

    def speaker_rule(self, dataset: str) -> SpeakerRule:
        """Return the rule for speaker tags; ``dataset`` is used if neither a record nor the source names a dataset."""
        return SpeakerRule(self.template(), self.language or UNDETERMINED, self.dataset or dataset)

    def needed_keys(self) -> dict[str, tuple[str, str]]:
        """Return the keys that at least one record must have.

        Each key is mapped to (name in the input, clause about the setting that uses it).
        """
        template = self.template()
        keys = [] if template is None else template.keys
        return {key: (key, f"the speaker template {self.speaker!r} uses the key {key!r}") for key in keys}

    def check_keys(self) -> None:
        """Raise ConfigError if a key that the configuration names is missing from all of the first records."""
        needed = self.needed_keys()
        if not needed:
            return
        known: dict[str, None] = {}
        for raw in itertools.islice(self.records(), _FIRST_RECORDS):
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                if not isinstance(raw, UnreadableRecord):
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
    """A source that reads files named by paths and patterns under ``file_keys``.

    Attributes:
        digests: for a key, the part of its files that is read for the identity; files of other keys are read
            completely.
    """

    digests: ClassVar[dict[str, Digest]] = {}

    def find(self, key: str) -> list[Location]:
        """Return the files that a key names, in order."""
        return find_files(self.named(key), self.cache)

    @property
    def file_key(self) -> str:
        """The first key that is set; its files contain the records."""
        return next(filter(self.named, self.file_keys))

    @cached_property
    def files(self) -> list[Location]:
        """The files of the first key that is set."""
        return self.find(self.file_key)

    def identity(self) -> dict[str, Any]:
        """Return the size and checksum of each file, by key, number and name; check that the files are readable."""
        self.check()
        keys = [key for key in self.file_keys if self.named(key)]
        return {key: identify_files(self.find(key), self.digests.get(key, "whole")) for key in keys}


@dataclass(frozen=True, kw_only=True)
class EncodedSource(Source):
    """A source whose text files may have an encoding other than UTF-8."""

    encoding: str = "utf-8"
    """Encoding of the texts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            newline = "\n".encode(self.encoding)
        except LookupError as error:
            raise ValueError(f"unknown text encoding {self.encoding!r}; use a name such as utf-8 or latin-1") from error
        require(newline == b"\n", f"texts in {self.encoding} are not supported; save them as UTF-8")


@dataclass(frozen=True, kw_only=True)
class ColumnSource(Source):
    """A source whose records consist of named columns.

    Attributes:
        checks_columns: True if ``check`` itself makes sure that the columns exist, even if they are empty in the first
            records.
    """

    checks_columns: ClassVar[bool] = False
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """Keys of records and their columns: ``{text: sentence}``, ``{text: texts.0}``."""

    @property
    def mapped(self) -> set[str]:
        """All names in ``columns``: the keys of records as well as the columns."""
        return {*self.columns, *self.columns.values()}

    def name_keys(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the columns, renamed to the keys of a record."""
        mapped = self.mapped
        kept = {column: value for column, value in values.items() if column not in mapped}
        found = {key: find_value(values, column) for key, column in self.columns.items()}
        return kept | {key: value for key, value in found.items() if value is not ...}

    def needed_keys(self) -> dict[str, tuple[str, str]]:
        """Return the keys that at least one record must have; see ``Source.needed_keys``."""
        columns = {} if self.checks_columns else self.columns
        taken = {key: (column, f"columns.{key} uses the column {column!r}") for key, column in columns.items()}
        return taken | super().needed_keys()


def find_value(values: Any, path: str) -> Any:
    """Return the value at a key, or at a path of keys and indices such as ``texts.0``; return ``...`` if there is none.

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
    """A source that divides its input into runs of entries, such as the lines of a file or the files of a folder.

    A piece consists of whole runs, or of parts of a run that is larger than a piece. Each entry becomes one record.
    """

    @abstractmethod
    def runs(self, size: int) -> Iterator[tuple[list[Any], int]]:
        """Yield (location, number of entries) for each run; the location is a list of JSON values.

        If the source can choose, a run has about ``size`` entries.

        Raises:
            ConfigError: the input as a whole cannot be used.
        """

    @abstractmethod
    def entries(self, place: list[Any], begin: int, end: int) -> Iterator[Any]:
        """Yield entries ``begin`` to ``end`` of a run, with an UnreadableRecord for each entry that cannot be read."""

    def record(self, entry: Any) -> RawRecord:
        """Return the record of an entry, by default the entry itself; raise RejectRecord if it has no valid record."""
        return entry

    def shown(self, entry: Any) -> str:
        """Return the text of an entry, as shown if the entry is rejected."""
        return entry.decode("utf-8", "replace")

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield pieces that consist of runs or of parts of runs; each run can be found again by its location."""
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
                    yield entry if isinstance(entry, UnreadableRecord) else self.record(entry)
                except RejectRecord as reject:
                    yield UnreadableRecord(reject.reason, reject.detail, self.shown(entry))


@dataclass(frozen=True, kw_only=True)
class LineSource(RunSource, FileSource):
    """A source of line-based files, plain or compressed; blank lines are ignored."""

    def runs(self, size: int) -> Iterator[tuple[list[Any], int]]:
        """Yield runs of lines; each run can be found again by its file and the position of its first line."""
        # Files are identified by number, because they may have been moved with the project before they are read.
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
        """Return an iterator over entries ``begin`` to ``end`` of a run of lines."""
        lines = itertools.chain.from_iterable(self.split_line(line) for _, line in self.lines(*place))
        return itertools.islice(lines, begin, end)

    def split_line(self, line: Any) -> Sequence[Any]:
        """Return the entries of a line; by default the line is the only entry."""
        return (line,)

    def lines(self, number: int, begin: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield (end position, line) for the lines of a file, from position ``begin`` on.

        Raises:
            ConfigError: the file is damaged.
        """
        # Open a separate stream to scan from the first line, since other pieces may be read in the meantime.
        stream = self._open(self.files[number]) if begin else open_lines(self.files[number])
        stream.seek(begin)
        return iterate_stream(stream, self.files[number], self.file_key, begin)

    @cached_property
    def _open(self) -> Callable[[Location], BinaryIO]:
        """The function that opens a file. It keeps the last file open, so that the next piece can continue in it."""
        return lru_cache(maxsize=1)(open_lines)


@dataclass(frozen=True, kw_only=True)
class ContainerSource(FileSource):
    """A source of files that contain the audio itself, such as tar archives; the last of ``file_keys`` names them."""

    audio_root: str | None = None
    """Folder that names and ids are relative to; ``null`` is the common folder of all files."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.audio_root is None:
            folders = []
            # It is enough to check the first and the last file, however many files a pattern names.
            for pattern in self.named(self.file_keys[-1]):
                names = expand_shards(re.split(r"[*?]", str(self.path_of(pattern)))[0])
                folders += [os.path.dirname(name) or "." for name in (names[0], names[-1])]  # noqa: PTH120
            # Restore the double slash of a URL, which commonpath removes.
            common = re.sub(r"^([a-z0-9]+):/", r"\1://", os.path.commonpath(folders))
            object.__setattr__(self, "audio_root", common or ".")

    def container(self, file: Location) -> str:
        """Return the path of a file relative to the audio root, as used in ``Member.container`` and ``audio_filepath``.

        Raises:
            ConfigError: the file is outside the audio root.
        """
        root = AudioRoot.of(self.audio_root)
        try:
            return normalise_path(str(file.absolute()), root.names)
        except RejectRecord as error:
            raise ConfigError(
                f"{file} is not below the audio root {self.audio_root}; leave audio_root out, or name a folder "
                "that contains all files",
                code="bad_config_value",
            ) from error
