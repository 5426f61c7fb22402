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

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from sharmill.audio.fetch import check_url_root, is_url
from sharmill.audio.roots import AudioRoot, normalise_path
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import Channel, Member
from sharmill.registry import nearest
from sharmill.sources.files import expand_home, expand_shards, find_files, identify_files, names_several
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
class Located:
    """A raw record whose audio lies in a container file, such as a tar archive.

    Attributes:
        record: one JSON text, as of any record. Its ``audio_filepath`` is the name of the audio: the path of the
            container relative to the audio root, and behind it the name in the container: ``shard.tar/member.wav`` or
            ``table.parquet#7``. Ids follow from it.
        member: where the audio is to be found.
    """

    record: bytes
    member: Member


# Of a raw record as a source yields it.
RawRecord = bytes | Located | Unreadable


def record_text(raw: RawRecord) -> bytes:
    """Return the JSON text of a raw record, or what there is of one that cannot be read."""
    return raw if isinstance(raw, bytes) else raw.record if isinstance(raw, Located) else raw.record.encode()


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """One input of a dataset, with the keys that every source has. A subclass is such a dataclass with further keys.

    Attributes:
        file_keys: the keys that name files or folders of records. Manifests are called after the first that is given.
        folder_keys: further keys that name folders.
    """

    file_keys: ClassVar[tuple[str, ...]] = ()
    folder_keys: ClassVar[tuple[str, ...]] = ()
    type: str
    """Kind of the source: ``nemo``, one that another package declares, or ``python:package.module:Class``."""
    audio_root: str | list[str] | None
    """Folder that ``audio_filepath`` is relative to, or a list of them. Audio outside is rejected. ``null`` takes
    absolute paths anywhere on this machine, so a manifest can then name any audio file. A URL, ``https://host/speech``,
    has the audio below it fetched into the run directory."""
    speaker: str | None = None
    """Template that makes the name of the speaker of keys and of parts of the path, such as ``{spk}``, ``{path[0]}``,
    ``{utt:prefix}`` (up to the first ``-`` or ``_``). ``null`` takes the record's ``speaker``: a tag, or a name."""
    language: str | None = None
    """Language of records that have neither a speaker tag nor ``language`` or ``lang``; ``null`` is ``und``."""
    dataset: str | None = None
    """Name for the speaker tags of records that have none; ``null`` is the name of the dataset."""
    channel: Channel = None
    """Channel of audio that has several, from 0, or ``downmix`` for their mean. A record's own ``channel`` comes first.
    ``null`` rejects such audio where the record has none."""

    def __post_init__(self) -> None:
        for key in ("audio_root", *self.file_keys):
            if getattr(self, key) is not None and not all(path.strip() for path in self.named(key) or [""]):
                hint = "; audio_root: null takes absolute paths anywhere" if key == "audio_root" else ""
                raise ValueError(f"{key} must not be empty{hint}")
        for url in filter(is_url, self.named("audio_root")):
            check_url_root(url)
        for key in ("language", "dataset"):
            value = getattr(self, key)
            if value is not None and (not value or value.split() != [value]):
                raise ValueError(f"{key} {value!r} must be a word without blanks")
        if isinstance(self.channel, int) and self.channel < 0:
            raise ValueError("channel must be a number from 0, or downmix")
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
        return Path(named.removesuffix(".gz")).stem

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
        if any(map(is_url, self.named("audio_root"))):
            raise ValueError(f"audio_root of {self.type} is a folder to look into, and cannot be a URL")

    def template(self) -> Template | None:
        """Return the template of ``speaker``; raise ValueError where it is none."""
        return None if self.speaker is None else Template.parse(self.speaker)

    def speaker_rule(self, dataset: str) -> SpeakerRule:
        """Return the rule that makes speaker tags; ``dataset`` is the name of the dataset."""
        return SpeakerRule(self.template(), self.language or UNDETERMINED, self.dataset or dataset)

    def check_speaker(self) -> None:
        """Raise ConfigError where ``speaker`` takes a key that none of the first records has."""
        template = self.template()
        if template is None or not template.keys:
            return
        records = []
        for line in itertools.islice(self.records(), _FIRST_RECORDS):
            try:
                record = None if isinstance(line, Unreadable) else msgspec.json.decode(record_text(line))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if isinstance(record, dict):
                records.append(record)
        if (unknown := template.find_unknown(records)) is not None:
            key, known = unknown
            raise ConfigError(
                f"the speaker template {self.speaker!r} takes the key {key!r}, which none of the first {len(records)} "
                f"records has{nearest(key, known)}",
                code="unknown_key",
            )


@dataclass(frozen=True, kw_only=True)
class FileSource(Source):
    """A source of files that paths and patterns under ``file_keys`` name."""

    def find(self, key: str) -> list[Path]:
        """Return the files that a key names, in order."""
        return find_files(self.named(key))

    @cached_property
    def files(self) -> list[Path]:
        """The files of the first key that is given."""
        return find_files(next(filter(None, map(self.named, self.file_keys))))

    def identity(self) -> dict[str, Any]:
        """Return the size and checksum of every file, by its key, number and name; also prove that each can be read."""
        self.check()
        return {key: identify_files(self.find(key)) for key in self.file_keys if self.named(key)}


@dataclass(frozen=True, kw_only=True)
class ContainerSource(FileSource):
    """A source of files that hold the audio itself, such as tar archives; the last of ``file_keys`` names them."""

    audio_root: str | None = None
    """Folder that the names of the audio begin below, and so its ids; ``null`` is the one that all files lie in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.audio_root is None:
            object.__setattr__(self, "audio_root", _common_folder(self.named(self.file_keys[-1])))

    def container(self, file: Path) -> str:
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


def _common_folder(patterns: list[str]) -> str:
    """Return the folder that all files of some patterns lie in, however many the patterns find."""
    folders = []
    for pattern in patterns:
        names = expand_shards(re.split(r"[*?]", str(expand_home(pattern)))[0])
        folders += [os.path.dirname(name) or "." for name in (names[0], names[-1])]  # noqa: PTH120
    return os.path.commonpath(folders) or "."
