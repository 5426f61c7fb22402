"""The typed utterance with its context, its JSON line, its speaker tag, and random access to lines of a manifest.

The keys in ``OWN_KEYS`` are sharmill's own: they travel from stage to stage and are not kept in a dataset.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import xxhash

from sharmill.errors import FatalError, RejectRecord
from sharmill.files.atomic import open_new
from sharmill.files.stored import open_stored

TYPED_KEYS: Final = ("audio_filepath", "offset", "duration", "text", "speaker")
# The keys that may hold the transcript, the first one with any text first.
TEXT_KEYS: Final = ("text", "normalized_text", "tts_text", "tts_text_normalized")
# Seconds by which a part, such as a word of a segment, may go beyond the whole: times are rounded, and pauses divided.
MAX_BEYOND: Final = 0.1
# Digits of seconds, as lhotse has them.
TIME_DIGITS: Final = 8
# A line of more bytes is no record, and would be carried through all stages and into the dataset.
MAX_RECORD_BYTES: Final = 16 << 20
_MAX_LINE_BYTES: Final = 64 << 20
# A reject keeps only a part of a record that is larger than this as JSON.
_MAX_KEPT_BYTES: Final = 8 << 10
# The limit of Linux: a longer path cannot be opened.
MAX_PATH: Final = 4096
# Stands beside ``duration`` where that was read from the header of the audio, since the record had none.
DURATION_FROM_HEADER: Final = "duration_from_header"
# The id that a cut had in its source, where that keeps ids.
SOURCE_CUT_ID: Final = "source_cut_id"
# Key of a record for the times of its words, phones and the like; see ``fit_alignments``. A cut has them as the
# alignment of its supervision.
ALIGNMENT: Final = "_alignment"
_NOT_IN_IDS: Final = re.compile(r"[\s/\x00-\x1f\x7f]+")
_MAX_ID: Final = 200
# The speaker tag as the record had it, where the dataset has its language in another form.
ORIGINAL_TAG: Final = "original_speaker"
# By field, the key of a cut for the share of its samples that were beyond full scale and were clipped when they were
# stored; only cuts with such samples have it.
CLIPPED_KEYS: Final = {"target_audio": "clipped_in_writing", "context_audio": "context_clipped_in_writing"}
# The speaker tag that NeMo's text-to-speech data carries.
_TAG: Final = re.compile(r"^\s*\|(.*)\|\s*$", re.DOTALL)
_TAG_PARTS: Final = ("Language", "Dataset", "Speaker")
# The keys that a record is known by.
SEGMENT_KEYS: Final = ("audio_filepath", "offset", "duration", DURATION_FROM_HEADER)
# In the order in which they are written; the last two only where there is such a thing.
CONTEXT_KEYS: Final = (
    "context_audio_filepath",
    "context_audio_offset",
    "context_audio_duration",
    "context_audio_text",
    "context_speaker_similarity",
    "context_recording_id",
    "context_audio_normalized_text",
    "context_audio_channel",
)
# sharmill's own too, where a segment has such a thing.
PLACE_KEYS: Final = ("_channel", "_member")
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

# A channel from 0, or the mean of all; None where the audio is mono.
Channel = int | Literal["downmix"] | None

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


class _AlignmentItem(NamedTuple):
    """A word, phone or the like with its time in seconds: an array in JSON, as lhotse writes it."""

    symbol: str
    start: float
    duration: float
    score: float | None = None


def fit_alignments(alignments: Any, begin: float, start: float, end: float) -> dict[str, list[list[Any]]] | None:
    """Return the alignments of a segment, ``{"word": [[symbol, start, duration, score], ...]}``, clipped to it.

    Args:
        alignments: JSON, in the same form or without scores.
        begin: the time from which seconds are to count.
        start, end: times of the segment.

    Returns:
        None if they have another form, or an item lies outside of the segment: the times of all count from another
        place then.
    """
    try:
        found = msgspec.convert(alignments, dict[str, list[_AlignmentItem]])
    except msgspec.ValidationError:
        return None
    fitted: dict[str, list[list[Any]]] = {kind: [] for kind in found}
    for kind, items in found.items():
        for item in items:
            times = (item.start, item.start + item.duration)
            if not start - MAX_BEYOND <= times[0] <= times[1] <= end + MAX_BEYOND:
                return None
            first, last = (min(max(start, time), end) for time in times)
            fitted[kind].append(
                [item.symbol, round(first - begin, TIME_DIGITS), round(last - first, TIME_DIGITS), item.score]
            )
    return fitted


@dataclass(frozen=True, slots=True)
class AudioNotes:
    """Notes about the audio of a segment, by which a later stage sees that the file has been replaced since.

    Attributes:
        size: bytes of the file when the stage ``prepare`` saw it; -1 where it has not.
        modified: time of its last change then, in nanoseconds; -1 where it is not known.
        checksum: of its bytes or of the segment's samples, made where the audio was first read; "" before that.
        sound: ``audio.sound.Sound`` of the segment, packed, made there as well.
    """

    size: int = -1
    modified: int = -1
    checksum: str = ""
    sound: str = ""

    def __reduce__(self) -> tuple[type["AudioNotes"], tuple[Any, ...]]:
        # Ten times as fast as what slots have by default; a rank pickles each of its segments.
        return AudioNotes, (self.size, self.modified, self.checksum, self.sound)


class Member(NamedTuple):
    """The place of a recording in a container file, which needs no unpacking.

    Attributes:
        container: path of the container, relative to the audio root.
        kind: of the place: "bytes" is a range of the container's bytes, as a member of a tar archive is; "row:" with a
            name is that column of a row of a parquet or Arrow file.
        start: number of its first byte, or of its row.
        size: bytes of the recording, which is an audio file.
    """

    container: str
    kind: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a recording; two of the same place are equal, whatever is noted about their audio.

    Attributes:
        root: number of the audio root that ``audio_filepath`` is relative to.
        offset, duration: seconds.
        whole_file: the record had no offset, so it is the file, however long that is.
        channel: of audio with several.
        member: of a recording in a container file, of which ``audio_filepath`` is only the name.
    """

    root: int
    audio_filepath: str
    offset: float
    duration: float
    whole_file: bool
    notes: AudioNotes = field(default=AudioNotes(), compare=False)
    channel: Channel = None
    member: Member | None = None

    def __reduce__(self) -> tuple[type["Segment"], tuple[Any, ...]]:
        return Segment, (
            self.root, self.audio_filepath, self.offset, self.duration, self.whole_file, self.notes, self.channel,
            self.member,
        )  # fmt: skip

    @property
    def file(self) -> str:
        """The path of the file that holds the recording, relative to the audio root."""
        return self.audio_filepath if self.member is None else self.member.container

    @property
    def recording(self) -> tuple[int, str, Member | None]:
        """Equal for segments of one recording under one name."""
        return self.root, self.file, self.member


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
            self.segment.channel,
        )
        record = dict(zip(CONTEXT_KEYS, values, strict=True))
        return {key: value for key, value in record.items() if value is not None or key not in CONTEXT_KEYS[-2:]}


@dataclass(slots=True)
class Utterance:
    """One record of a manifest that passed the checks.

    ``segment`` is its audio; ``custom`` has all further keys as they came. ``index`` is the line number in the prepared
    manifest, known from stage 1 on, as is ``context``.
    """

    segment: Segment
    text: str
    speaker: str
    custom: dict[str, Any] = field(default_factory=dict)
    index: int = -1
    recording_id: str = ""
    cut_id: str = ""
    context: Context | None = None

    def typed_keys(self) -> dict[str, Any]:
        """Return the keys of a manifest that have attributes here."""
        segment = self.segment
        values = (segment.audio_filepath, segment.offset, segment.duration, self.text, self.speaker)
        return dict(zip(TYPED_KEYS, values, strict=True))

    def further_keys(self) -> dict[str, Any]:
        """Return the keys of a manifest that have no attribute here: those of the source, and those of the context."""
        return {**self.custom, **(self.context.record() if self.context else {})}

    def public_record(self) -> dict[str, Any]:
        """Return the keys of a NeMo manifest, without sharmill's own."""
        return {**self.typed_keys(), **self.further_keys()}

    def to_json(self) -> bytes:
        """Encode as one JSON line, without the newline."""
        segment, context = self.segment, self.context.segment if self.context else None
        own = (
            segment.root,
            segment.whole_file,
            self.index,
            self.recording_id,
            self.cut_id,
            segment.notes.size,
            segment.notes.checksum,
            context and _own_context(context),
            _own_times(segment.notes, context.notes if context else AudioNotes()),
        )
        places = zip(PLACE_KEYS, (segment.channel, segment.member), strict=True)
        known = {key: value for key, value in places if value is not None}
        return _encoder.encode({**self.public_record(), **known, **dict(zip(OWN_KEYS, own, strict=True))})

    @classmethod
    def from_json(cls, line: bytes) -> "Utterance":
        """Decode the line of a manifest that sharmill wrote, where every key is known to be there."""
        record = _decoder.decode(line)
        path, offset, duration, text, speaker = map(record.pop, TYPED_KEYS)
        root, whole_file, index, recording, cut, size, checksum, own_context, modified = map(record.pop, OWN_KEYS)
        channel, member = (record.pop(key, None) for key in PLACE_KEYS)
        notes = AudioNotes(size, int(modified[0]), checksum, *modified[2:3])
        place = Member(*member) if member else None
        segment = Segment(root, path, offset, duration, whole_file, notes, channel, place)
        context = None
        if own_context is not None:
            path, offset, duration, context_text, similarity, context_recording = map(record.pop, CONTEXT_KEYS[:-2])
            normalized_text, context_channel = (record.pop(key, None) for key in CONTEXT_KEYS[-2:])
            context_root, context_whole_file, context_size, context_checksum, *context_member = own_context
            notes = AudioNotes(context_size, int(modified[1]), context_checksum, *modified[3:])
            place = Member(*context_member[0]) if context_member else None
            other = Segment(context_root, path, offset, duration, context_whole_file, notes, context_channel, place)
            context = Context(other, context_recording, context_text, similarity, normalized_text)
        return cls(segment, text, speaker, record, index, recording, cut, context)


def _own_context(context: Segment) -> tuple[Any, ...]:
    own = (context.root, context.whole_file, context.notes.size, context.notes.checksum)
    return own if context.member is None else (*own, context.member)


def _own_times(target: AudioNotes, context: AudioNotes) -> tuple[str, ...]:
    """Return what is noted of two segments beside the times of their files, and no checksum of records has."""
    # All times have one width, so that byte offsets in plans stay if a manifest is made again from copied files.
    times = (f"{target.modified:020d}", f"{context.modified:020d}")
    return (*times, target.sound, context.sound) if target.sound or context.sound else times


def transcript_of(record: Any) -> str:
    """Return the first text of ``TEXT_KEYS`` that is not blank, "" where there is none."""
    texts = (record.get(key) for key in TEXT_KEYS) if isinstance(record, dict) else ()
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


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


def nemo_language(language: str) -> str:
    """Return the language of a tag as NeMo reads it, in letters, digits and underscores: ``en_US`` for ``en-US``."""
    return re.sub(r"\W", "_", language)


@lru_cache(maxsize=1 << 12)
def parse_speaker_tag(tag: str) -> SpeakerTag:
    """Parse a speaker tag. Those of the last records are kept: mostly the next one has the same.

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


def tagged_speaker(tag: str) -> str:
    """Return the speaker of a tag that sharmill has written, without parsing the rest; others are parsed.

    Raises:
        RejectRecord: as ``parse_speaker_tag``.

    >>> tagged_speaker("| Language:en Dataset:d Speaker:anna |")
    'anna'
    """
    _, _, rest = tag.partition(" Speaker:")
    speaker, end, _ = rest.partition(" ")
    return speaker if speaker and end else parse_speaker_tag(tag).speaker


class Reduced(NamedTuple):
    """The part that is kept of a large record, and the hash of the whole."""

    kept: Any
    hash: int


def hash_whole(record: Any) -> int:
    """Return the xxh3-64 of a record as JSON with sorted keys, or of its text."""
    is_text = isinstance(record, str)
    return xxhash.xxh3_64_intdigest(
        record.encode("utf-8", "surrogatepass") if is_text else msgspec.json.encode(record, order="sorted")
    )


def reduce_record(record: Any) -> Any:
    """Return a record as it is, or ``Reduced`` to what it is known by, or the beginning of its text."""
    if isinstance(record, str):
        return record if len(record) <= _MAX_KEPT_BYTES else Reduced(record[: _MAX_KEPT_BYTES // 8], hash_whole(record))
    if len(_encoder.encode(record)) <= _MAX_KEPT_BYTES:
        return record
    kept: Any = {}
    if isinstance(path := record.get("audio_filepath"), str) and len(path) <= MAX_PATH:
        known_by = {key: record[key] for key in SEGMENT_KEYS if key in record}
        kept = known_by if len(_encoder.encode(known_by)) <= 8 * MAX_PATH else {}
    return Reduced(kept, hash_whole(record))


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that ended outside the dataset. ``record`` is the parsed record, or the raw text where it has none.

    Of a large record a part is kept, with a hash of the whole by which it is found again. ``source`` is the number of
    the source of a record as it came, None where a stage has made its path relative.
    """

    stage: str
    reason: str
    detail: str
    record: Any
    source: int | None = None

    def __post_init__(self) -> None:
        # At once: a unit may have many.
        object.__setattr__(self, "record", reduce_record(self.record))

    def to_json(self) -> bytes:
        values = {"stage": self.stage, "reason": self.reason, "detail": self.detail, "record": self.record}
        if isinstance(self.record, Reduced):
            values |= {"record": self.record.kept, "record_hash": self.record.hash}
        return _encoder.encode(values if self.source is None else {**values, "source": self.source})


def recording_id(audio_filepath: str, channel: Channel = None) -> str:
    """Return ``rec-`` and the relative path without its extension, ``/`` replaced by ``-``, and the channel chosen.

    >>> recording_id("calls/one.wav"), recording_id("calls/one.wav", 1), recording_id("train.parquet#7")
    ('rec-calls-one', 'rec-calls-one-ch1', 'rec-train#7')
    """
    # pathlib would take a large part of the time that checking a cut takes.
    folder, slash, name = audio_filepath.rpartition("/")
    stem, _, extension = name.rpartition(".")
    path = folder + slash + stem if stem and extension else audio_filepath
    if "#" in extension and path is not audio_filepath and (row := extension.rpartition("#")[2]).isdecimal():
        path += f"#{row}"
    suffix = "" if channel is None else "-downmix" if channel == "downmix" else f"-ch{channel}"
    return "rec-" + path.replace("/", "-") + suffix


def segment_id(recording: str, offset: float, duration: float) -> str:
    """Return the id of a segment of a recording; seconds with two decimals."""
    return f"cut-{recording}-{offset:.2f}-{duration:.2f}"


def canonical_id(text: str) -> str:
    """Return the id of a cut as it is where it can name a file, else changed, with a hash of it behind.

    >>> canonical_id("84-1-0"), canonical_id("call 7/a")
    ('84-1-0', 'call_7_a-97e9fc0073718ce8')
    """
    name = _NOT_IN_IDS.sub("_", text)
    if name == text and 0 < len(name.encode()) <= _MAX_ID:
        return text
    return f"{name[: _MAX_ID // 4]}-{xxhash.xxh3_64_hexdigest(text.encode())}"


def kept_id(custom: dict[str, Any]) -> str | None:
    """Return the id of a cut that was kept from its source, canonical; None where ids are made of paths."""
    return canonical_id(custom[SOURCE_CUT_ID]) if SOURCE_CUT_ID in custom else None


def write_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Write lines to a plain file (not atomically: the caller stages and publishes it); return their number."""
    count = 0
    with open_new(path) as stream:
        for line in lines:
            stream.write(line + b"\n")
            count += 1
    return count


def records_checksum(path: Path) -> str:
    """Return the xxh3-64 (hexadecimal) of the records of a manifest that sharmill wrote, times of files left out.

    A plan is identified by it, and has to stay the same where files were copied and only their times differ. What was
    measured of their sound stands beside the times, and is left out too. The lengths of the lines count, since plans
    have their byte offsets.
    """
    digest = xxhash.xxh3_64()
    with open_stored(path) as stream:
        while line := stream.readline(_MAX_LINE_BYTES):
            digest.update(b"%d:" % len(line) + line[: line.rfind(_TIMES)])
    return digest.hexdigest()


def read_lines_at(path: Path, offsets: np.ndarray) -> list[bytes]:
    """Read the lines that begin at the byte ``offsets``, in the order of ``offsets``.

    Raises:
        FatalError: the file ends before an offset: it is not the one that the offsets were made from.
    """
    lines: list[bytes] = [b""] * len(offsets)
    with open_stored(path) as stream:
        for position in np.argsort(offsets, kind="stable"):
            stream.seek(int(offsets[position]))
            line = stream.readline(_MAX_LINE_BYTES)
            if not line.endswith(b"\n"):
                raise FatalError(
                    f"{path} is shorter than when it was planned; run this stage with --restart", code="changed_input"
                )
            lines[position] = line.rstrip(b"\n")
    return lines
