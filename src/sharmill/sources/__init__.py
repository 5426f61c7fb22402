"""Input formats: each module turns one kind of manifest into raw records, in pieces that can be read in parallel.

A source is a dataclass whose fields are the keys of its entry under ``sources`` in a configuration. A package adds one
by an entry point in the group ``sharmill.sources``, or a configuration names it: ``type: python:package.module:Class``.

>>> import json
>>> from dataclasses import dataclass
>>> from pathlib import Path
>>> @dataclass(frozen=True, kw_only=True)
... class FolderSource(Source):
...     type: str = "folder"
...     audio_root: str
...     speaker: str
...
...     def identity(self):
...         return {path.name: path.stat().st_size for path in self._files()}
...
...     def pieces(self, records_per_piece):
...         for path in self._files():
...             yield Piece(1, {"name": path.name})
...
...     def read(self, piece):
...         yield json.dumps({"audio_filepath": piece["name"], "speaker": self.speaker}).encode()
...
...     def _files(self):
...         return sorted(Path(self.audio_root).glob("*.wav"))
>>> FolderSource(audio_root="recordings", speaker="ada").type
'folder'
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec

from sharmill.audio.fetch import check_url_root, is_url
from sharmill.errors import ConfigError
from sharmill.manifest import Channel, Member
from sharmill.registry import nearest
from sharmill.sources.speakers import UNDETERMINED, SpeakerRule
from sharmill.sources.templates import Template

# So many records are looked at before any work to see which keys there are.
_FIRST_RECORDS: Final = 1000
_RECORD_KEYS: Final = ("speaker", "language", "dataset", "channel")


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


class Source(ABC):
    """One input of a dataset. A subclass is a frozen, keyword-only dataclass with at least these two fields.

    Derive it from ``SpeechSource`` to have the keys ``speaker``, ``language``, ``dataset`` and ``channel`` too.

    Attributes:
        type: the name under which a configuration asks for it.
        audio_root: the folder that the audio paths of its records are relative to, a list of them, or None for any
            absolute path.
    """

    type: str
    audio_root: str | list[str] | None

    def check(self) -> None:  # noqa: B027 (most sources can be checked only by reading them)
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

    def stem(self) -> str | None:
        """Return how the manifests made from this source alone are called; None for the name of the dataset."""
        return None

    def paths(self) -> dict[str, str]:
        """Return the keys that are paths, and the paths."""
        return {name: path for name, path in name_paths("audio_root", self.audio_root).items() if not is_url(path)}

    def settings(self) -> dict[str, Any]:
        """Return the keys other than ``audio_root``, for the plan's identity; of files their names only."""
        return {key: value for key, value in dataclasses.asdict(cast("Any", self)).items() if key != "audio_root"}

    def speaker_rule(self, dataset: str) -> SpeakerRule:
        """Return the rule that makes speaker tags; ``dataset`` is the name of the dataset."""
        return SpeakerRule(None, UNDETERMINED, dataset)

    def default_channel(self) -> Channel:
        """Return the channel of audio that has several, where the record says none; None to reject such audio."""
        return None

    def keeps_ids(self) -> bool:
        """Return True if records have the ids of their cuts under ``SOURCE_CUT_ID``, to be those of the dataset."""
        return False

    def check_speaker(self) -> None:  # noqa: B027 (there is nothing to check without a template)
        """Raise ConfigError where no speaker can be made of the first records."""


@dataclass(frozen=True, kw_only=True)
class SpeechSource(Source):
    """The keys that all of sharmill's own sources have."""

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
        roots = self.audio_root if isinstance(self.audio_root, list) else [self.audio_root]
        if not roots or any(root is not None and not root.strip() for root in roots):
            raise ValueError("audio_root must not be empty; audio_root: null takes absolute paths anywhere")
        for url in (root for root in roots if root is not None and is_url(root)):
            check_url_root(url)
            if self.lists_root:
                raise ValueError(f"audio_root of {self.type} is a folder to look into, and cannot be a URL")
        for key in ("language", "dataset"):
            value = getattr(self, key)
            if value is not None and (not value or value.split() != [value]):
                raise ValueError(f"{key} {value!r} must be a word without blanks")
        if isinstance(self.channel, int) and self.channel < 0:
            raise ValueError("channel must be a number from 0, or downmix")
        self.template()

    @property
    def lists_root(self) -> bool:
        """True where the source itself looks into ``audio_root``, which has to be a folder then."""
        return False

    def template(self) -> Template | None:
        """Return the template of ``speaker``; raise ValueError where it is none."""
        return None if self.speaker is None else Template.parse(self.speaker)

    def settings(self) -> dict[str, Any]:
        """Return the keys other than ``audio_root``, and other than those of all sources where they are not set."""
        return {key: v for key, v in super().settings().items() if v is not None or key not in _RECORD_KEYS}

    def default_channel(self) -> Channel:
        """Return ``channel``."""
        return self.channel

    def speaker_rule(self, dataset: str) -> SpeakerRule:
        """Return the rule of ``speaker``, ``language`` and ``dataset``."""
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


def name_paths(key: str, paths: str | list[str] | None) -> dict[str, str]:
    """Return the paths of a key, each under its name; those of a list are numbered.

    >>> name_paths("audio_root", ["a", "b"])
    {'audio_root[0]': 'a', 'audio_root[1]': 'b'}
    """
    if isinstance(paths, list):
        return {f"{key}[{number}]": os.path.expanduser(path) for number, path in enumerate(paths)}  # noqa: PTH111
    return {} if paths is None else {key: os.path.expanduser(paths)}  # noqa: PTH111


def check_encoding(encoding: str) -> None:
    """Raise ValueError where an encoding is unknown, or its lines do not end as those of ASCII."""
    try:
        if "\n".encode(encoding) != b"\n":
            raise ValueError(f"texts in {encoding} cannot be read: save them as UTF-8")
    except LookupError as error:
        raise ValueError(f"there is no encoding {encoding!r} of texts") from error
