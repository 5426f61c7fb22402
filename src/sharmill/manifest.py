"""Records of manifests: typed utterances with contexts, their JSON lines and speaker tags, and random access to lines.

The keys in ``OWN_KEYS`` are internal: they are passed from stage to stage and are not stored in a dataset.
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
# Keys that may hold the transcript, in order of preference.
TEXT_KEYS: Final = ("text", "normalized_text", "tts_text", "tts_text_normalized")
# Tolerance in seconds for a part, such as a word, that extends beyond its segment because times are rounded.
MAX_BEYOND: Final = 0.1
# Decimal digits of times in seconds, as in lhotse.
TIME_DIGITS: Final = 8
# Longer lines are rejected, since every stage and the dataset would have to carry such a large record.
MAX_RECORD_BYTES: Final = 16 << 20
_MAX_LINE_BYTES: Final = 64 << 20
# If a record's JSON is larger than this, its reject stores only a part of the record.
_MAX_KEPT_BYTES: Final = 8 << 10
# Linux cannot open longer paths.
MAX_PATH: Final = 4096
# Key that marks a ``duration`` that was read from the header of the audio, because the record had none.
DURATION_FROM_HEADER: Final = "duration_from_header"
# Key for the id of a cut in its source, if the source keeps ids.
SOURCE_CUT_ID: Final = "source_cut_id"
# Key of a record for the times of its words or phones; see ``fit_alignments``. In a cut, they become the alignment of
# the supervision.
ALIGNMENT: Final = "_alignment"
_NOT_IN_IDS: Final = re.compile(r"[\s/\x00-\x1f\x7f]+")
_MAX_ID: Final = 200
# Key for the original speaker tag, used if the dataset stores the tag's language in another form.
ORIGINAL_TAG: Final = "original_speaker"
# For each audio field, the key for the share of samples that were clipped in writing. Only cuts with clipped samples
# have this key.
CLIPPED_KEYS: Final = {"target_audio": "clipped_in_writing", "context_audio": "context_clipped_in_writing"}
# The speaker tag of NeMo's text-to-speech data.
_TAG: Final = re.compile(r"^\s*\|(.*)\|\s*$", re.DOTALL)
_TAG_PARTS: Final = ("Language", "Dataset", "Speaker")
# Keys that identify a record.
SEGMENT_KEYS: Final = ("audio_filepath", "offset", "duration", DURATION_FROM_HEADER)
# Keys of a context, in the order in which they are written; the last two keys are optional.
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
# Optional internal keys.
PLACE_KEYS: Final = ("_channel", "_member")
# Internal keys, in the order in which they are written. The last key ends the line, so that a checksum can leave it out
# without parsing the JSON.
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

# A channel number, counted from 0, or the mean of all channels; None for mono audio.
Channel = int | Literal["downmix"] | None

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


class _AlignmentItem(NamedTuple):
    """Word or phone with its start and duration in seconds; encoded as a JSON array, as in lhotse."""

    symbol: str
    start: float
    duration: float
    score: float | None = None


def fit_alignments(alignments: Any, begin: float, start: float, end: float) -> dict[str, list[list[Any]]] | None:
    """Return alignments clipped to a segment, as ``{"word": [[symbol, start, duration, score], ...]}``.

    Args:
        alignments: alignments in the same form, with or without scores.
        begin: origin of the returned times, in seconds.
        start, end: times of the segment in seconds.

    Returns:
        None if the alignments have another form, or if an item is outside the segment, which means that the times are
        relative to another origin.
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
    """Properties of the audio of a segment, from which later stages detect that the file has been replaced.

    Attributes:
        size: size of the file in bytes when ``prepare`` saw it; -1 if ``prepare`` did not see it.
        modified: modification time of the file when ``prepare`` saw it, in nanoseconds; -1 if unknown.
        checksum: checksum of the file's bytes or of the segment's samples, computed when the audio is first read; ""
            until then.
        sound: packed ``audio.sound.Sound`` of the segment, computed at the same time.
    """

    size: int = -1
    modified: int = -1
    checksum: str = ""
    sound: str = ""

    def __reduce__(self) -> tuple[type["AudioNotes"], tuple[Any, ...]]:
        # This is ten times faster than the default for classes with slots, and ranks pickle every segment.
        return AudioNotes, (self.size, self.modified, self.checksum, self.sound)


class Member(NamedTuple):
    """Location of a recording in a container file, which is not unpacked.

    Attributes:
        container: path of the container, relative to the audio root.
        kind: "bytes" for a range of bytes, such as a member of a tar archive; "row:" and the name of a column for a row
            of a parquet or Arrow file.
        start: number of the first byte, or of the row.
        size: size of the recording's audio file in bytes.
    """

    container: str
    kind: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a recording. Segments with the same location are equal, regardless of their ``notes``.

    Attributes:
        root: number of the audio root that ``audio_filepath`` is relative to.
        offset, duration: times in seconds.
        whole_file: True if the segment is the whole file, whatever its length, because the record had no offset.
        channel: the channel of multi-channel audio to use.
        member: location in a container file; ``audio_filepath`` is then only a name.
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
        """Key that is equal for all segments of one recording."""
        return self.root, self.file, self.member


@dataclass(frozen=True, slots=True)
class Context:
    """Context of an utterance: another segment of its speaker group, with its texts.

    Attributes:
        similarity: cosine similarity of the two voices.
        normalized_text: the normalized text; None if the source has none.
    """

    segment: Segment
    recording_id: str
    text: str
    similarity: float
    normalized_text: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the manifest keys of a context."""
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
    """Record of a manifest that has passed the checks.

    Attributes:
        segment: the audio.
        custom: all further keys, unchanged.
        index: line number in the manifest of ``prepare``, from the stage ``match`` on.
        context: the context, from the stage ``match`` on.
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
        """Return the manifest keys that have attributes in this class."""
        segment = self.segment
        values = (segment.audio_filepath, segment.offset, segment.duration, self.text, self.speaker)
        return dict(zip(TYPED_KEYS, values, strict=True))

    def further_keys(self) -> dict[str, Any]:
        """Return the remaining manifest keys: custom keys of the source, and keys of the context."""
        return {**self.custom, **(self.context.record() if self.context else {})}

    def public_record(self) -> dict[str, Any]:
        """Return the keys of a NeMo manifest, without internal keys."""
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
        """Decode a line of a manifest that sharmill wrote, in which no key is missing."""
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
    """Return the file times and sound measures of a target and its context; checksums of records exclude these."""
    # Times have a fixed width, so that byte offsets in plans stay valid if a manifest is rebuilt from copied files.
    times = (f"{target.modified:020d}", f"{context.modified:020d}")
    return (*times, target.sound, context.sound) if target.sound or context.sound else times


def transcript_of(record: Any) -> str:
    """Return the first text of ``TEXT_KEYS`` that is not blank, or ""."""
    texts = (record.get(key) for key in TEXT_KEYS) if isinstance(record, dict) else ()
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


@dataclass(frozen=True, slots=True)
class SpeakerTag:
    """Parts of a speaker tag such as ``| Language:en Dataset:HiFiTTS Speaker:9136_other |``."""

    language: str
    dataset: str
    speaker: str
    further: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the tag in the order and spacing that NeMo requires."""
        parts = (f"Language:{self.language}", f"Dataset:{self.dataset}", f"Speaker:{self.speaker}", *self.further)
        return f"| {' '.join(parts)} |"


def nemo_language(language: str) -> str:
    """Return a language in the form that NeMo reads in tags, with letters, digits and underscores: ``en_US``."""
    return re.sub(r"\W", "_", language)


@lru_cache(maxsize=1 << 12)
def parse_speaker_tag(tag: str) -> SpeakerTag:
    """Parse a speaker tag; results are cached, since consecutive records often have the same tag.

    Raises:
        RejectRecord: ``bad_speaker`` if the tag does not have the form ``| Language:.. Dataset:.. Speaker:.. |``.
    """
    match = _TAG.match(tag)
    words = match[1].split() if match else []
    parts = dict(word.split(":", 1) for word in words if ":" in word)
    # A word without a colon means that a name contains a space; ignoring the rest of the name could merge two speakers.
    if not all(parts.get(name) for name in _TAG_PARTS) or not all(":" in word for word in words):
        raise RejectRecord(
            "bad_speaker",
            f"the speaker tag {tag[:100]!r} does not have the form '| Language:en Dataset:name Speaker:id |'",
        )
    further = tuple(word for word in words if word.partition(":")[0] not in _TAG_PARTS)
    return SpeakerTag(parts["Language"], parts["Dataset"], parts["Speaker"], further)


def tagged_speaker(tag: str) -> str:
    """Return the speaker in a tag. To save time, tags in the form that sharmill writes are not fully parsed.

    Raises:
        RejectRecord: as for ``parse_speaker_tag``.

    >>> tagged_speaker("| Language:en Dataset:d Speaker:anna |")
    'anna'
    """
    _, _, rest = tag.partition(" Speaker:")
    speaker, end, _ = rest.partition(" ")
    return speaker if speaker and end else parse_speaker_tag(tag).speaker


class Reduced(NamedTuple):
    """Part of a large record, with the hash of the whole record."""

    kept: Any
    hash: int


def hash_whole(record: Any) -> int:
    """Return the xxh3-64 hash of a text, or of a record as JSON with sorted keys."""
    is_text = isinstance(record, str)
    return xxhash.xxh3_64_intdigest(
        record.encode("utf-8", "surrogatepass") if is_text else msgspec.json.encode(record, order="sorted")
    )


def reduce_record(record: Any) -> Any:
    """Return a small record unchanged; reduce a large record to its identifying keys or to the start of its text."""
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
    """Rejected record.

    Attributes:
        record: the parsed record, or the raw text if it cannot be parsed. A large record is reduced to a part, with a
            hash that identifies the whole.
        source: number of the source, for a record as it is in the source; None if a stage has made its path relative.
    """

    stage: str
    reason: str
    detail: str
    record: Any
    source: int | None = None

    def __post_init__(self) -> None:
        # The record is reduced immediately, since a unit may have many rejects in memory.
        object.__setattr__(self, "record", reduce_record(self.record))

    def to_json(self) -> bytes:
        values = {"stage": self.stage, "reason": self.reason, "detail": self.detail, "record": self.record}
        if isinstance(self.record, Reduced):
            values |= {"record": self.record.kept, "record_hash": self.record.hash}
        return _encoder.encode(values if self.source is None else {**values, "source": self.source})


def recording_id(audio_filepath: str, channel: Channel = None) -> str:
    """Return the id of a recording: ``rec-``, the path without extension and with ``-`` for ``/``, and the channel.

    >>> recording_id("calls/one.wav"), recording_id("calls/one.wav", 1), recording_id("train.parquet#7")
    ('rec-calls-one', 'rec-calls-one-ch1', 'rec-train#7')
    """
    # pathlib is avoided, since it would dominate the time for checking a cut.
    folder, slash, name = audio_filepath.rpartition("/")
    stem, _, extension = name.rpartition(".")
    path = folder + slash + stem if stem and extension else audio_filepath
    if "#" in extension and path is not audio_filepath and (row := extension.rpartition("#")[2]).isdecimal():
        path += f"#{row}"
    suffix = "" if channel is None else "-downmix" if channel == "downmix" else f"-ch{channel}"
    return "rec-" + path.replace("/", "-") + suffix


def segment_id(recording: str, offset: float, duration: float) -> str:
    """Return the id of a segment of a recording, which contains the times in seconds with two decimals."""
    return f"cut-{recording}-{offset:.2f}-{duration:.2f}"


def canonical_id(text: str) -> str:
    """Return a cut id that is usable as a file name: unchanged if possible, otherwise cleaned and with a hash appended.

    >>> canonical_id("84-1-0"), canonical_id("call 7/a")
    ('84-1-0', 'call_7_a-97e9fc0073718ce8')
    """
    name = _NOT_IN_IDS.sub("_", text)
    if name == text and 0 < len(name.encode()) <= _MAX_ID:
        return text
    return f"{name[: _MAX_ID // 4]}-{xxhash.xxh3_64_hexdigest(text.encode())}"


def kept_id(custom: dict[str, Any]) -> str | None:
    """Return the canonical form of a cut id that was kept from its source; None if ids are derived from paths."""
    return canonical_id(custom[SOURCE_CUT_ID]) if SOURCE_CUT_ID in custom else None


def write_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Write lines to a file and return their number; the write is not atomic, since the caller publishes the file."""
    count = 0
    with open_new(path) as stream:
        for line in lines:
            stream.write(line + b"\n")
            count += 1
    return count


def records_checksum(path: Path) -> str:
    """Return the hexadecimal xxh3-64 of the records of a manifest that sharmill wrote, without file times.

    The checksum is part of a plan's identity, which must not change if files are copied and get new times. The sound
    measures, which follow the times, are also left out. The lengths of lines are included, since plans contain byte
    offsets.
    """
    digest = xxhash.xxh3_64()
    with open_stored(path) as stream:
        while line := stream.readline(_MAX_LINE_BYTES):
            digest.update(b"%d:" % len(line) + line[: line.rfind(_TIMES)])
    return digest.hexdigest()


def read_lines_at(path: Path, offsets: np.ndarray) -> list[bytes]:
    """Read the lines that start at these byte offsets, in the order of ``offsets``.

    Raises:
        FatalError: the file ends before an offset, so it has changed since the offsets were computed.
    """
    lines: list[bytes] = [b""] * len(offsets)
    with open_stored(path) as stream:
        for position in np.argsort(offsets, kind="stable"):
            stream.seek(int(offsets[position]))
            line = stream.readline(_MAX_LINE_BYTES)
            if not line.endswith(b"\n"):
                raise FatalError(
                    f"{path} has become shorter since the plan was made: run this stage with --restart",
                    code="changed_input",
                )
            lines[position] = line.rstrip(b"\n")
    return lines


def read_utterances_at(path: Path, offsets: np.ndarray) -> list[Utterance]:
    """Return the utterances of the lines that ``read_lines_at`` returns."""
    return [Utterance.from_json(line) for line in read_lines_at(path, offsets)]
