"""The typed utterance, its JSON line, the speaker tag, and random access to the lines of a manifest.

The keys in ``OWN_KEYS`` are sharmill's own: they travel from stage to stage and are not kept in a dataset.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sharmill.errors import FatalError, RejectRecord

_TAG = re.compile(r"^\s*\|(.*)\|\s*$", re.DOTALL)
_TAG_PARTS = ("Language", "Dataset", "Speaker")
TYPED_KEYS = ("audio_filepath", "offset", "duration", "text", "speaker")
OWN_KEYS = (
    "_source",
    "_whole_file",
    "_index",
    "_recording_id",
    "_cut_id",
    "_context_source",
    "_context_whole_file",
)

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
        """The tag in the order and spacing that NeMo asks for."""
        parts = (f"Language:{self.language}", f"Dataset:{self.dataset}", f"Speaker:{self.speaker}", *self.further)
        return f"| {' '.join(parts)} |"


def parse_speaker_tag(tag: str) -> SpeakerTag:
    """Parses a speaker tag.

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
class Segment:
    """A stretch of a recording. ``whole_file``: the record had no offset, so it is the file, however long that is."""

    source: int
    audio_filepath: str
    offset: float
    duration: float
    whole_file: bool


@dataclass(slots=True)
class Utterance:
    """One record of a manifest that passed the checks.

    ``audio_filepath`` is relative to the audio root of source number ``source``; ``offset`` and ``duration`` are
    seconds; ``custom`` has all further keys as they came. ``index`` is the line number in the prepared manifest,
    known from stage 1 on.
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
    context_source: int = 0
    context_whole_file: bool = False

    @property
    def segment(self) -> Segment:
        return Segment(self.source, self.audio_filepath, self.offset, self.duration, self.whole_file)

    @property
    def context_segment(self) -> Segment:
        """The segment of the context; only after stage 1."""
        return Segment(
            self.context_source,
            self.custom["context_audio_filepath"],
            self.custom["context_audio_offset"],
            self.custom["context_audio_duration"],
            self.context_whole_file,
        )

    def public_record(self) -> dict[str, Any]:
        """The keys of a NeMo manifest, without sharmill's own."""
        return {**{key: getattr(self, key) for key in TYPED_KEYS}, **self.custom}

    def to_json(self) -> bytes:
        """One JSON line, without the newline."""
        return _encoder.encode({**self.public_record(), **{key: getattr(self, key[1:]) for key in OWN_KEYS}})

    @classmethod
    def from_json(cls, line: bytes) -> Utterance:
        """The inverse of ``to_json``: for manifests that sharmill wrote, where every key is known to be there."""
        record = _decoder.decode(line)
        fields = {key: record.pop(key) for key in TYPED_KEYS} | {key[1:]: record.pop(key) for key in OWN_KEYS}
        return cls(**fields, custom=record)


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
    """``rec-`` and the relative path without its extension, ``/`` replaced by ``-``."""
    stem = str(Path(audio_filepath).with_suffix("")) if Path(audio_filepath).suffix else audio_filepath
    return "rec-" + stem.replace("/", "-")


def segment_id(recording: str, offset: float, duration: float) -> str:
    """The id of a segment of a recording; seconds with two decimals."""
    return f"cut-{recording}-{offset:.2f}-{duration:.2f}"


def iterate_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their newlines; blank lines are left out."""
    with path.open("rb") as stream:
        for line in stream:
            if stripped := line.strip():
                yield stripped


def write_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Writes lines to a plain file (not atomically: the caller stages and publishes it) and returns their number."""
    count = 0
    with path.open("wb") as stream:
        for line in lines:
            stream.write(line + b"\n")
            count += 1
    return count


def read_lines_at(path: Path, offsets: np.ndarray) -> list[bytes]:
    """The lines that begin at the byte ``offsets``, in the order of ``offsets``.

    Raises:
        FatalError: the file ends before an offset: it is not the one that the offsets were made from.
    """
    lines: list[bytes] = [b""] * len(offsets)
    with path.open("rb") as stream:
        for position in np.argsort(offsets, kind="stable"):
            stream.seek(int(offsets[position]))
            line = stream.readline()
            if not line.endswith(b"\n"):
                raise FatalError(f"{path} is shorter than when it was planned; run this stage with --restart")
            lines[position] = line.rstrip(b"\n")
    return lines
