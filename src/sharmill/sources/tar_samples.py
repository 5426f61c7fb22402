"""Samples in tar archives: members that lie side by side and have the same name but for its end, audio and texts.

Archives are walked once when pieces are planned, several at a time, by their headers, since the number of samples has
to be known; a piece is then read from its first header on.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from sharmill.audio.files import open_audio
from sharmill.errors import RejectRecord
from sharmill.manifest import Member
from sharmill.prefetch import prefetch
from sharmill.sources import Located, Piece, RawRecord, Unreadable
from sharmill.sources.tar_members import TarDamage, TarMember, clean_name, walk_members

# Storage far away answers many at a time; each that waits for its turn takes 8 bytes a sample.
_ARCHIVES_AT_ONCE: Final = 16
# A text is read as a whole; a larger one is none of an utterance.
_MAX_TEXT_BYTES: Final = 16 << 20
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


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
