"""Tar archives as inputs: the places of their members, found by the headers alone, and samples of such members.

Whatever an archive has beside regular files is passed over: folders, links, devices, sparse files. Of one that is cut
off or damaged, the members before that place are used, and the place is told.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from sharmill.audio.files import open_audio
from sharmill.errors import RejectRecord
from sharmill.manifest import Member
from sharmill.prefetch import prefetch
from sharmill.shar.tar_headers import (
    BLOCK,
    EMPTY,
    GNU_LONG_NAME,
    MAX_EXTENSION_BYTES,
    PAX_HEADER,
    iterate_pax,
    parse_number,
    parse_pax_size,
    plain_name,
)
from sharmill.sources import ContainerSource, Located, Piece, RawRecord, Unreadable
from sharmill.sources.files import bad_file, open_input, refuse_compressed

# A header and what lies beside it in the file, such as a short text and the next header, in one read.
_WINDOW: Final = 4096
# Headers that describe the next one: long names and links of GNU's tar, PAX headers of one member, of Sun, of all.
_EXTENSIONS: Final = (GNU_LONG_NAME, b"K", PAX_HEADER, b"X", b"g")
_REGULAR: Final = (b"0", b"\0", b"7")
_SPARSE: Final = b"S"
# Links, devices, folders and FIFOs have no data, whatever their size says.
_WITHOUT_DATA: Final = (b"1", b"2", b"3", b"4", b"5", b"6")
# Storage far away answers many at a time; each that waits for its turn takes 8 bytes a sample.
_ARCHIVES_AT_ONCE: Final = 16
# A text is read as a whole; a larger one is none of an utterance.
_MAX_TEXT_BYTES: Final = 16 << 20
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class TarMember(NamedTuple):
    """A regular file in an archive.

    Attributes:
        name: as the archive has it; what is not UTF-8 in it is escaped by surrogates.
        header: position of its first header.
        start: position of its first byte.
        size: number of bytes.
    """

    name: str
    header: int
    start: int
    size: int


class TarDamage(NamedTuple):
    """The place from which on an archive cannot be read.

    Attributes:
        header: position of the first header that is concerned.
        sentence: what is wrong there.
        name: of the member that is cut off, where that is known.
        reason: of the reject that is made of it.
    """

    header: int
    sentence: str
    name: str = ""
    reason: str = "unreadable_audio"


def walk_members(path: Path, begin: int = 0) -> Iterator[TarMember | TarDamage]:
    """Yield the regular files of an archive from the header at ``begin`` on and, last, where it is damaged, if it is.

    Raises:
        RejectRecord: missing_audio or unreadable_audio where there is no such archive, or it cannot be opened.
    """
    with open_audio(path) as stream:
        walk = _Walk(stream.fileno(), begin)
        try:
            yield from walk.members()
        except _DamageError as error:
            yield TarDamage(walk.first, f"the archive {path.name} {error}; copy it again", error.name)


class _DamageError(Exception):
    """The archive ends here, within the member ``name`` if there is one, or what lies here is no header."""

    def __init__(self, sentence: str, name: str = "") -> None:
        super().__init__(sentence)
        self.name = name


class _Walk:
    """A walk over the headers of an archive; ``first`` is the position of the first header of the present member."""

    def __init__(self, descriptor: int, begin: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._window = b""
        self._window_start = 0
        self.first = begin

    def members(self) -> Iterator[TarMember]:
        position = self.first
        extension = _Extension()
        while (header := self._take(position, BLOCK)) != EMPTY:
            stored = _stored_size(header, position)
            kind = header[156:157]
            start = position + BLOCK
            if kind in _EXTENSIONS:
                if stored > MAX_EXTENSION_BYTES:
                    raise _DamageError(f"has a header of {stored} bytes at byte {position}")
                extension = extension.add(kind, self._take(start, stored), position)
                position = _padded(start + stored)
                continue
            raw_name = plain_name(header) if extension.name is None else extension.name
            size = 0 if kind in _WITHOUT_DATA else stored if extension.size is None else extension.size
            if kind == _SPARSE:
                start = self._skip_sparse_map(header, start)
            name = raw_name.decode("utf-8", "surrogateescape")
            if start + size > self._size:
                raise _DamageError(f"is cut off at byte {self._size}, within its member {name[:200]!r}", name)
            if kind in _REGULAR and not extension.sparse and not name.endswith("/"):
                yield TarMember(name, self.first, start, size)
            position = self.first = _padded(start + size)
            extension = _Extension()

    def _take(self, position: int, length: int) -> bytes:
        """Return bytes at a position."""
        offset = position - self._window_start
        if offset < 0 or offset + length > len(self._window):
            self._window = os.pread(self._descriptor, max(length, _WINDOW), position)
            self._window_start, offset = position, 0
        data = self._window[offset : offset + length]
        if len(data) < length:
            what = "within a header" if data else "before its end marker"
            raise _DamageError(f"is cut off at byte {self._size}, {what}")
        return data

    def _skip_sparse_map(self, header: bytes, start: int) -> int:
        """Return where the data of a sparse file begin, which the rest of a long map comes before."""
        goes_on = header[482]
        while goes_on:
            goes_on = self._take(start, BLOCK)[504]
            start += BLOCK
        return start


class _Extension(NamedTuple):
    """Facts about a member from the extended headers before it."""

    name: bytes | None = None
    size: int | None = None
    sparse: bool = False

    def add(self, kind: bytes, data: bytes, position: int) -> _Extension:
        """Return what is known with one more extended header."""
        if kind == GNU_LONG_NAME:
            return self._replace(name=data.rstrip(b"\0"))
        added = self
        try:
            for keyword, value in iterate_pax(data) if kind == PAX_HEADER else ():
                if keyword == b"path":
                    added = added._replace(name=value)
                elif keyword == b"size":
                    added = added._replace(size=parse_pax_size(value))
                elif keyword.startswith(b"GNU.sparse."):
                    added = added._replace(sparse=True)
        except ValueError as error:
            raise _DamageError(f"is damaged at byte {position}: {error}") from error
        return added


def _stored_size(header: bytes, position: int) -> int:
    """Return the size that a header gives."""
    size = parse_number(header[124:136])
    if size is None or not _is_header(header):
        raise _DamageError(f"is damaged at byte {position}, where no header is")
    return size


def _is_header(block: bytes) -> bool:
    """Return True if the checksum of a header is right, counted with blanks in its place."""
    return parse_number(block[148:156]) == sum(block) - sum(block[148:156]) + 8 * ord(" ")


def _padded(position: int) -> int:
    return position + -position % BLOCK


def check_tar(path: Path, kind: str) -> None:
    """Prove that a file can be an archive at all; ``kind`` is the key of the source that names it.

    Raises:
        ConfigError: it is missing, no regular file, compressed, or something else.
    """
    with open_input(path, kind) as stream:
        head = stream.read(BLOCK)
    refuse_compressed(path, kind, head)
    # A shorter one is cut off, which its records tell.
    if len(head) == BLOCK and head != EMPTY and not _is_header(head):
        raise bad_file(path, kind, "is no tar archive")


def clean_name(name: str) -> str:
    """Return the name of a member without ``.`` and further slashes, of which archives have more or less.

    >>> clean_name("./one.wav"), clean_name("/data//one.wav")
    ('one.wav', 'data/one.wav')
    """
    return "/".join(part for part in name.split("/") if part not in ("", "."))


@dataclass(frozen=True)
class MemberTable:
    """The members of an archive by their clean names.

    Attributes:
        members: None under a name that several have.
        damage: a sentence, if the archive is damaged behind these members.
    """

    members: dict[str, TarMember | None]
    damage: str | None


def read_table(path: Path) -> MemberTable:
    """Return the members of an archive.

    Raises:
        RejectRecord: as ``walk_members``.
    """
    members: dict[str, TarMember | None] = {}
    for member in walk_members(path):
        if isinstance(member, TarDamage):
            return MemberTable(members, member.sentence)
        name = clean_name(member.name)
        members[name] = None if name in members else member
    return MemberTable(members, None)


@dataclass(frozen=True, kw_only=True)
class TarSource(ContainerSource):
    """A source of tar archives that its key ``tars`` names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_url_roots()
        for pattern in self.named("tars"):
            if pattern.startswith("pipe:") or "://" in pattern:
                raise ValueError(f"tars {pattern!r} is a command or an address; copy the files, and name them")

    @cached_property
    def archives(self) -> list[Path]:
        """The archives, in order."""
        return self.find("tars")

    def check(self) -> None:
        """Raise ConfigError where a file cannot be an archive, or lies outside the audio root."""
        for file in self.archives:
            check_tar(file, "tars")
            self.container(file)

    def identity(self) -> dict[str, Any]:
        """Return the size of every archive, by its number and name: not its checksum, for which all had to be read."""
        self.check()
        return {"tars": {f"{number} {file.name}": file.stat().st_size for number, file in enumerate(self.archives)}}


@dataclass(frozen=True)
class TarSample:
    """The members of one key.

    Attributes:
        key: what their names have in common.
        header: position of the first header.
        members: with the ends of their names, in the order of the archive.
    """

    key: str
    header: int
    members: list[tuple[str, TarMember]]


@dataclass(frozen=True)
class Archive:
    """An archive of samples.

    Attributes:
        path: of the file.
        container: its path below the audio root.
        named: the path by which the audio root is asked for it.
        reject: where it cannot be one.
    """

    path: Path
    container: str
    named: str
    reject: Unreadable | None = None


@dataclass(frozen=True)
class SampleReader:
    """The samples of archives, as pieces and as records.

    Args:
        archives: in order.
        name: takes the names of members apart, into the key and the end; others belong to no sample.
        record_of: makes the record of a sample, but for its ``audio_filepath``: of its archive's open file and itself.
        audio_suffixes: ends of names of audio, without the first dot.
    """

    archives: Sequence[Archive]
    name: re.Pattern[str]
    record_of: Callable[[BinaryIO, TarSample], dict[str, msgspec.Raw]]
    audio_suffixes: Sequence[str]

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of samples, each found again by its archives and the first and the last header in them."""
        spans: list[list[Any]] = []
        count = 0
        numbers = range(len(self.archives))
        walked = prefetch(self._headers, numbers, threads=_ARCHIVES_AT_ONCE, ahead=2 * _ARCHIVES_AT_ONCE)
        for number, (headers, repeated) in enumerate(walked):
            span: list[Any] = []
            for header in headers:
                span = span or [number, header, header, []]
                span[2] = header
                if header in repeated:
                    span[3].append(header)
                count += 1
                if count == records_per_piece:
                    yield Piece(count, {"spans": [*spans, span]})
                    spans, span, count = [], [], 0
            spans += [span] if span else []
        if spans:
            yield Piece(count, {"spans": spans})

    def _headers(self, number: int) -> tuple[array[int], set[int]]:
        """Return the first header of each sample of an archive, and those of samples whose keys it had before."""
        headers, repeated = array("Q"), set[int]()
        keys: set[str] = set()
        for item in self.items(number, 0):
            headers.append(item.header)
            if isinstance(item, TarSample):
                if item.key in keys:
                    repeated.add(item.header)
                keys.add(item.key)
        return headers, repeated

    def read(self, piece: dict[str, Any]) -> Iterator[RawRecord]:
        """Yield the records of the samples of a piece; where an archive is damaged, that is one that is unreadable."""
        for number, first, last, repeated in piece["spans"]:
            archive = self.archives[number]
            stream: BinaryIO | None = None
            try:
                for item in self.items(number, first):
                    if item.header > last:
                        break
                    if isinstance(item, TarDamage):
                        yield Unreadable(item.reason, item.sentence, archive.container)
                        continue
                    stream = stream or open_audio(archive.path)
                    yield self._record(archive, stream, item, is_again=item.header in repeated)
            finally:
                if stream is not None:
                    stream.close()

    def items(self, number: int, begin: int = 0) -> Iterator[TarSample | TarDamage]:
        """Yield the samples of an archive from a header on and, last, where it is damaged, if it is."""
        archive = self.archives[number]
        if archive.reject is not None:
            yield TarDamage(0, archive.reject.detail, reason=archive.reject.reason)
            return
        try:
            yield from self._samples(archive.path, begin)
        except RejectRecord as reject:
            yield TarDamage(0, reject.detail, reason=reject.reason)

    def _samples(self, path: Path, begin: int) -> Iterator[TarSample | TarDamage]:
        sample: TarSample | None = None
        for item in walk_members(path, begin):
            match = self.name.fullmatch(clean_name(item.name))
            parts = (match[1], match[2].lower()) if match else None
            if isinstance(item, TarDamage):
                if sample and parts and parts[0] == sample.key:
                    # The sample is not complete.
                    item = item._replace(header=sample.header)
                elif sample:
                    yield sample
                yield item
                return
            if parts is None:
                continue
            if sample and sample.key == parts[0]:
                sample.members.append((parts[1], item))
                continue
            if sample:
                yield sample
            sample = TarSample(parts[0], item.header, [(parts[1], item)])
        if sample:
            yield sample

    def _record(self, archive: Archive, stream: BinaryIO, sample: TarSample, *, is_again: bool) -> RawRecord:
        name = f"{archive.container}/{sample.key}"
        shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        try:
            if shown != name:
                raise RejectRecord("malformed", "the name of the member is not UTF-8")
            if is_again:
                raise RejectRecord("ambiguous_audio", f"the archive has an earlier sample {sample.key[:200]!r}")
            member = self.audio_of(sample)
            record = self.record_of(stream, sample)
        except RejectRecord as reject:
            return Unreadable(reject.reason, reject.detail, shown)
        path = msgspec.json.encode(f"{archive.container}/{clean_name(member.name)}")
        text = msgspec.json.encode({"audio_filepath": msgspec.Raw(path)} | record)
        return Located(text, Member(archive.named, "bytes", member.start, member.size))

    def audio_of(self, sample: TarSample) -> TarMember:
        """Return the audio of a sample; raise RejectRecord where it has none, several, or two members of one name."""
        suffixes = [suffix for suffix, _ in sample.members]
        if again := next((suffix for suffix in suffixes if suffixes.count(suffix) > 1), None):
            raise RejectRecord("ambiguous_audio", f"the sample has two members .{again[:40]}")
        audio = [(suffix, member) for suffix, member in sample.members if suffix in self.audio_suffixes]
        if not audio:
            ends = ", ".join(f".{suffix[:40]}" for suffix in suffixes[:5])
            raise RejectRecord("missing_audio", f"the sample has no audio; its members end in {ends}")
        if len(audio) > 1:
            ends = ", ".join(f".{suffix[:40]}" for suffix, _ in audio[:5])
            raise RejectRecord("ambiguous_audio", f"the sample has several audio files, {ends}")
        return audio[0][1]


def read_part(stream: BinaryIO, member: TarMember, most: int = _MAX_TEXT_BYTES) -> bytes:
    """Return the bytes of a member of an archive, by default those of a text.

    Raises:
        RejectRecord: ``malformed`` where they are more than ``most``.
    """
    if member.size > most:
        raise RejectRecord(
            "malformed", f"{member.name[-100:]!r} has more than {most >> 20} MiB, which no text or audio has"
        )
    return os.pread(stream.fileno(), member.size, member.start)


def read_text(stream: BinaryIO, member: TarMember, encoding: str) -> msgspec.Raw:
    """Return a text in an archive as JSON; raise RejectRecord ``malformed`` where it is not in ``encoding``."""
    try:
        text = read_part(stream, member).decode(encoding).removeprefix("\ufeff").strip()
    except UnicodeDecodeError as error:
        sentence = f"{member.name[-100:]!r} is not {encoding}; set encoding of the source"
        raise RejectRecord("malformed", sentence) from error
    return msgspec.Raw(msgspec.json.encode(text))


def read_object(stream: BinaryIO, member: TarMember) -> dict[str, msgspec.Raw]:
    """Return a JSON object in an archive, its values as they are written; raise RejectRecord ``malformed``."""
    try:
        return _object.decode(read_part(stream, member).strip())
    except msgspec.ValidationError as error:
        raise RejectRecord("malformed", f"{member.name[-100:]!r} is not a JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RejectRecord("malformed", f"{member.name[-100:]!r} is not JSON: {error}") from error
