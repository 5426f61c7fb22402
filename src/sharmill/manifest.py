"""The typed utterance with its context, its JSON line, the speaker tag, and random access to the lines of a manifest.

The keys in ``OWN_KEYS`` are sharmill's own: they travel from stage to stage and are not kept in a dataset.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from sharmill.errors import FatalError, RejectRecord

_TAG = re.compile(r"^\s*\|(.*)\|\s*$", re.DOTALL)
_TAG_PARTS = ("Language", "Dataset", "Speaker")
TYPED_KEYS: Final = ("audio_filepath", "offset", "duration", "text", "speaker")
# In the order in which they are written.
CONTEXT_KEYS: Final = (
    "context_audio_filepath",
    "context_audio_offset",
    "context_audio_duration",
    "context_audio_text",
    "context_speaker_similarity",
    "context_recording_id",
    "context_audio_normalized_text",
)
# The last one ends the line, so that it can be left out of a checksum without reading the JSON.
OWN_KEYS: Final = (
    "_source",
    "_whole_file",
    "_index",
    "_recording_id",
    "_cut_id",
    "_size",
    "_checksum",
    "_context",
    "_modified",
)
_TIMES: Final = b',"_modified":'

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class SpeakerTag:
    """The parts of ``| Language:en Dataset:HiFiTTS Speaker:9136_other |``."""

    language: str
    dataset: str
    speaker: str
    further: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the tag in the order and spacing that NeMo asks for."""
        parts = (f"Language:{self.language}", f"Dataset:{self.dataset}", f"Speaker:{self.speaker}", *self.further)
        return f"| {' '.join(parts)} |"


def parse_speaker_tag(tag: str) -> SpeakerTag:
    """Parse a speaker tag.

    Raises:
        RejectRecord: ``bad_speaker`` where it is not of the form ``| Language:.. Dataset:.. Speaker:.. |``.
    """
    match = _TAG.match(tag)
    words = match[1].split() if match else []
    parts = dict(word.split(":", 1) for word in words if ":" in word)
    # A word without a colon is the rest of a name with a blank in it, and two such names may begin alike.
    if not all(parts.get(name) for name in _TAG_PARTS) or not all(":" in word for word in words):
        raise RejectRecord(
            "bad_speaker",
            f"the speaker tag {tag[:100]!r} is not of the form '| Language:en Dataset:name Speaker:id |'",
        )
    further = tuple(word for word in words if word.partition(":")[0] not in _TAG_PARTS)
    return SpeakerTag(parts["Language"], parts["Dataset"], parts["Speaker"], further)


@dataclass(frozen=True, slots=True)
class AudioNotes:
    """Notes about the audio of a segment, by which a later stage sees that the file has been replaced since.

    Attributes:
        size: bytes of the file when the stage ``prepare`` saw it; -1 where it has not.
        modified: time of its last change then, in nanoseconds; -1 where it is not known.
        checksum: of its bytes or of the segment's samples, made where the audio was first read; "" before that.
    """

    size: int = -1
    modified: int = -1
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a recording; two of the same place are equal, whatever is noted about their audio.

    Attributes:
        source: number of the source whose audio root ``audio_filepath`` is relative to.
        offset, duration: seconds.
        whole_file: the record had no offset, so it is the file, however long that is.
    """

    source: int
    audio_filepath: str
    offset: float
    duration: float
    whole_file: bool
    notes: AudioNotes = field(default=AudioNotes(), compare=False)


@dataclass(frozen=True, slots=True)
class Context:
    """The context of an utterance: another segment of its speaker group, with what the manifest says about it.

    ``similarity`` is the cosine of the two voices; ``normalized_text`` is None where the source has none.
    """

    segment: Segment
    recording_id: str
    text: str
    similarity: float
    normalized_text: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the keys of a manifest that stand for a context."""
        values = (
            self.segment.audio_filepath,
            self.segment.offset,
            self.segment.duration,
            self.text,
            self.similarity,
            self.recording_id,
            self.normalized_text,
        )
        record = dict(zip(CONTEXT_KEYS, values, strict=True))
        if self.normalized_text is None:
            del record["context_audio_normalized_text"]
        return record


@dataclass(slots=True)
class Utterance:
    """One record of a manifest that passed the checks.

    ``audio_filepath`` is relative to the audio root of source number ``source``; ``offset`` and ``duration`` are
    seconds; ``custom`` has all further keys as they came. ``index`` is the line number in the prepared manifest, known
    from stage 1 on, as is ``context``.
    """

    audio_filepath: str
    offset: float
    duration: float
    text: str
    speaker: str
    custom: dict[str, Any] = field(default_factory=dict)
    source: int = 0
    whole_file: bool = False
    index: int = -1
    recording_id: str = ""
    cut_id: str = ""
    notes: AudioNotes = AudioNotes()
    context: Context | None = None

    @property
    def segment(self) -> Segment:
        return Segment(self.source, self.audio_filepath, self.offset, self.duration, self.whole_file, self.notes)

    def further_keys(self) -> dict[str, Any]:
        """Return the keys of a manifest that have no attribute here: those of the source, and those of the context."""
        return {**self.custom, **(self.context.record() if self.context else {})}

    def public_record(self) -> dict[str, Any]:
        """Return the keys of a NeMo manifest, without sharmill's own."""
        return {**{key: getattr(self, key) for key in TYPED_KEYS}, **self.further_keys()}

    def to_json(self) -> bytes:
        """Encode as one JSON line, without the newline."""
        context = self.context.segment if self.context else None
        own = (
            self.source,
            self.whole_file,
            self.index,
            self.recording_id,
            self.cut_id,
            self.notes.size,
            self.notes.checksum,
            context and (context.source, context.whole_file, context.notes.size, context.notes.checksum),
            (self.notes.modified, context.notes.modified if context else -1),
        )
        return _encoder.encode({**self.public_record(), **dict(zip(OWN_KEYS, own, strict=True))})

    @classmethod
    def from_json(cls, line: bytes) -> Utterance:
        """Decode the line of a manifest that sharmill wrote, where every key is known to be there."""
        record = _decoder.decode(line)
        typed = {key: record.pop(key) for key in TYPED_KEYS}
        source, whole_file, index, recording, cut, size, checksum, own_context, modified = map(record.pop, OWN_KEYS)
        context = None
        if own_context is not None:
            path, offset, duration, text, similarity, context_recording = map(record.pop, CONTEXT_KEYS[:-1])
            context_source, context_whole_file, context_size, context_checksum = own_context
            notes = AudioNotes(context_size, modified[1], context_checksum)
            segment = Segment(context_source, path, offset, duration, context_whole_file, notes)
            context = Context(segment, context_recording, text, similarity, record.pop(CONTEXT_KEYS[-1], None))
        return cls(
            **typed,
            custom=record,
            source=source,
            whole_file=whole_file,
            index=index,
            recording_id=recording,
            cut_id=cut,
            notes=AudioNotes(size, modified[0], checksum),
            context=context,
        )


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that ended outside the dataset. ``record`` is the parsed record, or the raw text where it has none."""

    stage: str
    reason: str
    detail: str
    record: Any

    def to_json(self) -> bytes:
        return _encoder.encode(
            {"stage": self.stage, "reason": self.reason, "detail": self.detail, "record": self.record}
        )


def recording_id(audio_filepath: str) -> str:
    """Return ``rec-`` and the relative path without its extension, ``/`` replaced by ``-``."""
    # Without pathlib, which would be a large part of the time that checking a cut takes.
    folder, slash, name = audio_filepath.rpartition("/")
    stem, _, extension = name.rpartition(".")
    path = folder + slash + stem if stem and extension else audio_filepath
    return "rec-" + path.replace("/", "-")


def segment_id(recording: str, offset: float, duration: float) -> str:
    """Return the id of a segment of a recording; seconds with two decimals."""
    return f"cut-{recording}-{offset:.2f}-{duration:.2f}"


def iterate_lines(path: Path) -> Iterator[bytes]:
    """Iterate over the lines of a file without their newlines; blank lines are left out."""
    with path.open("rb") as stream:
        for line in stream:
            if stripped := line.strip():
                yield stripped


def write_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Write lines to a plain file (not atomically: the caller stages and publishes it); return their number."""
    count = 0
    with path.open("wb") as stream:
        for line in lines:
            stream.write(line + b"\n")
            count += 1
    return count


def records_checksum(path: Path) -> str:
    """Return the xxh3-64 (hexadecimal) of the records of a manifest that sharmill wrote, times of files left out.

    A plan is identified by it, and has to stay the same where files were copied and only their times differ.
    """
    digest = xxhash.xxh3_64()
    with path.open("rb") as stream:
        for line in stream:
            digest.update(line[: line.rfind(_TIMES)])
    return digest.hexdigest()


def read_lines_at(path: Path, offsets: np.ndarray) -> list[bytes]:
    """Read the lines that begin at the byte ``offsets``, in the order of ``offsets``.

    Raises:
        FatalError: the file ends before an offset: it is not the one that the offsets were made from.
    """
    lines: list[bytes] = [b""] * len(offsets)
    with path.open("rb") as stream:
        for position in np.argsort(offsets, kind="stable"):
            stream.seek(int(offsets[position]))
            line = stream.readline()
            if not line.endswith(b"\n"):
                raise FatalError(
                    f"{path} is shorter than when it was planned; run this stage with --restart", code="changed_input"
                )
            lines[position] = line.rstrip(b"\n")
    return lines
