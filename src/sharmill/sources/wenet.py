"""WeNet's lists: ``data.list`` with one JSON record a line, and lists of tar archives of audio and texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Literal

import msgspec

from sharmill.audio.fetch import is_url
from sharmill.audio.roots import AudioRoots
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import iterate_lines
from sharmill.sources import FileSource, Piece, RawRecord, Unreadable
from sharmill.sources.files import bad_file, check_encoding, open_input, read_ends, refuse_compressed
from sharmill.sources.nemo import NemoSource, decode_json_record
from sharmill.sources.tars import Archive, SampleReader, TarSample, read_text

_AUDIO_SUFFIXES: Final = ("flac", "mp3", "m4a", "ogg", "opus", "wav", "wma")
# As WeNet has it: the key goes up to the last dot.
_NAME: Final = re.compile(r"((?:.*/)?[^./][^/]*)\.([^./]+)")

# By these names records of ``raw`` have what manifests have by others.
_RENAMED: Final = ("wav", "txt", "start", "end")


@dataclass(frozen=True, kw_only=True)
class WenetSource(FileSource):
    """Records of WeNet's lists: of JSON lines (``raw``), or of tar archives (``shard``)."""

    file_keys: ClassVar[tuple[str, ...]] = ("data_list",)
    type: str = "wenet"
    data_list: str | list[str]
    """Path of the list, ``data.list``, or a list of such paths; ranges and ``*`` as in ``manifest`` of ``nemo``."""
    data_type: Literal["raw", "shard"] = "raw"
    """``raw``: lines of JSON with ``key``, ``wav``, ``txt``, and ``start`` and ``end`` of segments. ``shard``: paths of
    tar archives below ``audio_root``, with audio and a ``.txt`` of one name side by side."""
    key_pattern: str | None = None
    """Regular expression that is searched in the key; its named groups become keys of the record, such as ``speaker``
    of ``BAC[0-9]+(?P<speaker>S[0-9]+)W``."""
    encoding: str = "utf-8"
    """Encoding of the texts in archives, such as ``gbk``. One that cannot be decoded is rejected as ``malformed``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_type == "shard":
            self.refuse_url_roots()
        check_encoding(self.encoding)
        try:
            named = self.key_pattern is None or re.compile(self.key_pattern).groupindex
        except re.error as error:
            raise ValueError(f"key_pattern {self.key_pattern!r} is no regular expression: {error}") from error
        if not named:
            raise ValueError(f"key_pattern {self.key_pattern!r} has no named group, such as (?P<speaker>S[0-9]+)")

    def check(self) -> None:
        """Raise ConfigError where a file cannot be such a list, or an archive is compressed."""
        for file in self.files:
            head, _ = read_ends(file, "data_list")
            first = head.strip().splitlines()[0]
            if b"\0" in head:
                raise bad_file(file, "data_list", "is binary or UTF-16; save it as UTF-8")
            if first.startswith(b"{") and self.data_type == "shard":
                raise bad_file(file, "data_list", "has records, not paths of archives; set data_type: raw")
            if first.endswith(b".tar") and self.data_type == "raw":
                raise bad_file(file, "data_list", "has paths of archives; set data_type: shard")
        self._check_archives()

    def identity(self) -> dict[str, Any]:
        """Return sizes and checksums of the lists and, by number and name, the sizes of the archives that are there."""
        lists = super().identity()
        if self.data_type == "raw":
            return lists
        sizes = {
            f"{number} {archive.path.name}": archive.path.stat().st_size if archive.path.is_file() else None
            for number, archive in enumerate(self.archives)
        }
        return lists | {"tars": sizes}

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of lines, or of samples: to count these, the headers of all archives are walked."""
        if self.data_type == "raw":
            return self._lines.pieces(records_per_piece)
        return self.samples.pieces(records_per_piece)

    def read(self, piece: dict[str, Any]) -> Iterator[RawRecord]:
        """Yield the records of a piece."""
        if self.data_type == "raw":
            return map(self._raw_record, self._lines.read(piece))
        return self.samples.read(piece)

    @cached_property
    def _lines(self) -> NemoSource:
        return NemoSource(manifest=self.data_list, audio_root=self.audio_root)

    @cached_property
    def samples(self) -> SampleReader:
        """The samples in the archives of the lists of ``shard``."""
        return SampleReader(self.archives, _NAME, self._record_of, _AUDIO_SUFFIXES)

    @cached_property
    def archives(self) -> list[Archive]:
        """The archives of the lists of ``shard``; one that cannot be used has the reject that is made of it."""
        if self.data_type == "raw":
            return []
        roots = AudioRoots.of([self.audio_root])
        return [_archive(line, roots) for file in self.files for line in iterate_lines(file)]

    def _check_archives(self) -> None:
        found = [archive.path for archive in self.archives if archive.reject is None and archive.path.is_file()]
        if self.archives and not found:
            raise ConfigError(
                f"none of the {len(self.archives)} archives of data_list is there; correct audio_root in "
                "sources, the folder that they lie below",
                code="missing_input",
            )
        for path in found:
            with open_input(path, "data_list") as stream:
                refuse_compressed(path, "archive", stream.read(8))

    def _raw_record(self, line: bytes) -> RawRecord:
        """Return a line as a record, in which ``wav``, ``txt``, ``start`` and ``end`` have the names of manifests."""
        text = line.decode("utf-8", "replace")
        try:
            record, (key, start, end) = decode_json_record(line, ("key", "start", "end"))
        except RejectRecord as reject:
            return Unreadable(reject.reason, reject.detail, text)
        made: dict[str, Any] = {name: value for name, value in record.items() if name not in _RENAMED}
        made |= self._of_key(key)
        made |= {new: record[old] for old, new in (("wav", "audio_filepath"), ("txt", "text")) if old in record}
        if start is None and end is None:
            return msgspec.json.encode(made)
        if not (type(start) in (int, float) and type(end) in (int, float) and 0 <= start < end):
            return Unreadable("malformed", "start and end are not times in seconds of which end is later", text)
        return msgspec.json.encode(made | {"offset": start, "duration": end - start})

    def _record_of(self, stream: BinaryIO, sample: TarSample) -> dict[str, msgspec.Raw]:
        """Return the record of a sample: its key, and its text."""
        record = {"key": _raw(sample.key)} | self._of_key(sample.key)
        parts = dict(sample.members)
        return record | ({"text": read_text(stream, parts["txt"], self.encoding)} if "txt" in parts else {})

    def _of_key(self, key: Any) -> dict[str, msgspec.Raw]:
        """Return what the pattern finds in a key."""
        match = re.search(self.key_pattern, key) if self.key_pattern and isinstance(key, str) else None
        return {name: _raw(value) for name, value in match.groupdict().items() if value is not None} if match else {}


def _archive(line: bytes, roots: AudioRoots) -> Archive:
    """Return the archive that a line of a list names."""
    text = line.decode("utf-8", "replace")
    try:
        if is_url(text):
            raise RejectRecord("outside_root", f"{text[:200]!r} is an address; copy the archive below the audio root")
        number, container = roots.place(0, text)
        return Archive(roots.roots[number].path / container, container, text)
    except RejectRecord as reject:
        return Archive(Path(text), text, text, Unreadable(reject.reason, reject.detail, text))


def _raw(value: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
