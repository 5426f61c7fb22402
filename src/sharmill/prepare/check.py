"""The checks of one record: fields, types, speaker, text, filters, file, header and duration."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

from sharmill.audio.decoder import AudioInfo
from sharmill.audio.files import choose_channel, open_recording
from sharmill.audio.roots import AudioRoots, normalise_path
from sharmill.comparisons import Comparison, parse_comparison
from sharmill.config import NotNegative, Positive, Presence, StageSection, require
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import (
    ALIGNMENT,
    CLIPPED_KEYS,
    DURATION_FROM_HEADER,
    MAX_RECORD_BYTES,
    ORIGINAL_TAG,
    OWN_KEYS,
    PLACE_KEYS,
    SOURCE_CUT_ID,
    TYPED_KEYS,
    AudioNotes,
    Channel,
    Member,
    Segment,
    SpeakerTag,
    Utterance,
    fit_alignments,
    kept_id,
    nemo_language,
    recording_id,
    segment_id,
    transcript_of,
)
from sharmill.shar.manifests import plain_value
from sharmill.shar.reading.safety import find_forbidden
from sharmill.sources import RawRecord, Source, UnreadableRecord, record_text
from sharmill.sources.files import decode_object
from sharmill.sources.nemo import skip_mark
from sharmill.sources.speakers import NO_SPEAKER, SpeakerRule, is_missing, names_no_language
from sharmill.stages.speaker_key import SpeakerKey, needs_speaker

# Keys of a record that are not copied to ``custom``. CLIPPED_KEYS are among them, because they describe clipping in an
# earlier dataset.
_NOT_CUSTOM = {*TYPED_KEYS, *OWN_KEYS, *PLACE_KEYS, *CLIPPED_KEYS.values(), SOURCE_CUT_ID, "_skipme"}
# Maximum nesting of a record's JSON. The interpreter's own limit depends on the depth of the call stack, which could
# differ between executors.
_MAX_DEPTH = 100
# Longest valid duration or offset (31 years). Longer times are invalid, and would distort the sums.
MAX_SECONDS = 1e9
_TYPES: dict[str, tuple[type, ...]] = {
    "audio_filepath": (str,),
    "duration": (int, float),
    "offset": (int, float),
    "speaker": (str, int),
    "text": (str,),
    "normalized_text": (str,),
}

_KINDS = {str: "a text", int: "a number", float: "a number", bool: "true or false", list: "a list", dict: "an object"}


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(StageSection):
    """Conditions that a record must meet. Other records are rejected with a reason."""

    presence: ClassVar[Presence] = "always"

    min_duration: NotNegative = 0.1
    """Shortest utterance, in seconds."""
    max_duration: float | None = 600.0
    """Longest utterance, in seconds. A codec processes each utterance as a whole."""
    duration_tolerance: NotNegative = 0.1
    """Largest accepted difference between the duration in the manifest and in the audio header, in seconds."""
    require_text: bool = True
    """Reject records without text; ``false`` keeps untranscribed speech."""
    filters: dict[str, str] = field(default_factory=dict)
    """Conditions on manifest keys with numbers, such as ``{cer: "<= 0.03", bandwidth: ">= 8000"}``."""
    unit_records: Positive = 2000
    """Records per unit of work."""

    def __post_init__(self) -> None:
        require(self.max_duration is None or self.max_duration > self.min_duration,
                 "max_duration must be greater than min_duration")  # fmt: skip


def parse_filters(filters: Mapping[str, str]) -> list[Comparison]:
    """Parse the filters of a configuration.

    Raises:
        ConfigError: a filter is not a comparison with a number.
    """
    parsed = []
    for key, text in sorted(filters.items()):
        if (comparison := parse_comparison(key, text)) is None:
            raise ConfigError(
                f"prepare.filters.{key}: {text!r} is not a comparison with a number; write for example '<= 0.03'",
                code="bad_config_value",
            )
        parsed.append(comparison)
    return parsed


@dataclass(frozen=True)
class RecordCheck:
    """Checks a record of a source, and turns it into an Utterance or rejects it.

    Attributes:
        speakers: rule for speaker tags of each source.
        group_key: function that returns the key of a speaker group for the path of the audio and the speaker's name.
    """

    config: PrepareConfig
    filters: list[Comparison]
    roots: AudioRoots
    sources: Sequence[Source]
    speakers: Sequence[SpeakerRule]
    group_key: SpeakerKey

    def __call__(self, record: dict[str, Any], source: int, member: Member | None = None) -> Utterance:
        """Return the utterance of a record.

        Args:
            record: the decoded record.
            source: number of the record's source.
            member: location of the audio in a container; None if the audio is a file.

        Raises:
            RejectRecord: the record fails a check. Cheap checks come first.
        """
        if mark := skip_mark(record):
            reason = f": {mark[:200]}" if isinstance(mark, str) else ""
            raise RejectRecord("skipped", f"the record is marked with _skipme{reason}")
        check_fields(record)
        root, path, member = self._place(record["audio_filepath"], source, member)
        tag = self._tag(record, path, source)
        self.group_key(path, tag.speaker)
        text = transcript_of(record)
        if not text and self.config.require_text:
            if record.get("text") is None:
                raise RejectRecord("missing_field", "the record has neither text nor normalized_text")
            raise RejectRecord("empty_text", "text and normalized_text are empty")
        for condition in self.filters:
            if fault := condition.fault(record.get(condition.key)):
                raise RejectRecord("filtered", fault)
        no_duration = record.get("duration") is None
        if not no_duration:
            self._check_duration(_seconds(record, "duration"))
        file = self.roots.obtain(root, path if member is None else member.container, is_container=member is not None)
        with open_recording(file, member, path) as opened:
            info = opened.info
        # A record's ``channel`` selects a channel only if the audio has several.
        own = record.get("channel") if info.channels > 1 else None
        channel = choose_channel(self.sources[source].channel if own is None else own, info.channels)
        offset, duration = map(float, segment_times(record, info, self.config.duration_tolerance))
        if no_duration:
            self._check_duration(duration)
        status, (speaker, original) = file.stat(), _written(tag)
        recording, custom = recording_id(path, channel), _further_keys(record, channel, no_duration)
        if ALIGNMENT in custom:
            seconds = min(duration, info.num_samples / info.sampling_rate - offset)
            if (alignments := fit_alignments(custom[ALIGNMENT], 0.0, 0.0, seconds)) is None:
                form = '{"word": [[symbol, start, duration], ...]}'
                raise RejectRecord("malformed", f"{ALIGNMENT} must have the form {form}, with times within the segment")
            custom[ALIGNMENT] = alignments
        if self.sources[source].keeps_ids:
            custom[SOURCE_CUT_ID] = record[SOURCE_CUT_ID]
        notes = AudioNotes(status.st_size if member is None else member.size, status.st_mtime_ns)
        return Utterance(
            Segment(root, path, offset, duration, record.get("offset") is None, notes, channel, member),
            text,
            speaker,
            custom=custom if original is None else custom | {ORIGINAL_TAG: original},
            recording_id=recording,
            cut_id=kept_id(custom) or segment_id(recording, offset, duration),
        )

    def group(self, record: dict[str, Any], source: int, member: Member | None = None) -> str:
        """Return the key of a record's speaker group, without reading its audio.

        Raises:
            RejectRecord: the record is malformed, or its path or speaker yields no key.
        """
        check_fields(record)
        _, path, _ = self._place(record["audio_filepath"], source, member)
        return self.group_key(path, self._tag(record, path, source).speaker)

    def _place(self, audio_filepath: str, source: int, member: Member | None) -> tuple[int, str, Member | None]:
        """Return the audio root's number, the normalised path below it, and the member with a normalised container."""
        if member is None:
            return *self.roots.place(source, audio_filepath), None
        root, container = self.roots.place(source, member.container)
        path = normalise_path(audio_filepath)
        if not path.startswith((f"{container}/", f"{container}#")):
            raise RejectRecord("outside_root", "the name of the audio leads out of its container")
        return root, path, member._replace(container=container)

    def _tag(self, record: dict[str, Any], path: str, source: int) -> SpeakerTag:
        tag = self.speakers[source].make_tag(record, path, None if needs_speaker(self.group_key) else NO_SPEAKER)
        if tag is None:
            raise RejectRecord(
                "bad_speaker",
                f"speaker is {str(record.get('speaker'))[:80]!r}, which is not a name; speaker_key groups by speaker",
            )
        return tag

    def _check_duration(self, duration: float) -> None:
        shortest, longest = self.config.min_duration, self.config.max_duration
        if duration < shortest:
            raise RejectRecord("too_short", f"{duration:g} s is less than prepare.min_duration={shortest:g}")
        if longest is not None and duration > longest:
            raise RejectRecord("too_long", f"{duration:g} s is more than prepare.max_duration={longest:g}")


def segment_times(record: dict[str, Any], info: AudioInfo, tolerance: float) -> tuple[float, float]:
    """Return the offset and duration of a record in seconds. A missing duration is calculated from the audio header.

    Raises:
        RejectRecord: ``duration_mismatch`` if the duration of a record without an offset differs from that of its file
            by more than ``tolerance`` seconds, or a segment extends beyond its file by more than this.
    """
    seconds = info.num_samples / info.sampling_rate
    offset = record.get("offset") or 0.0
    duration = record.get("duration")
    duration = seconds - offset if duration is None else duration
    if record.get("offset") is None:
        if abs(duration - seconds) > tolerance:
            raise RejectRecord(
                "duration_mismatch", f"the duration is {duration:g} s in the manifest, but {seconds:g} s in the audio"
            )
    elif offset >= seconds:
        raise RejectRecord(
            "duration_mismatch", f"the segment starts at {offset:g} s, but the audio has only {seconds:g} s"
        )
    elif offset + duration > seconds + tolerance:
        raise RejectRecord(
            "duration_mismatch", f"the segment ends at {offset + duration:g} s, but the audio has only {seconds:g} s"
        )
    return offset, duration


@lru_cache(maxsize=1 << 12)
def _written(tag: SpeakerTag) -> tuple[str, str | None]:
    """Return a tag as text for the dataset, and the record's own tag as text if it differs, otherwise None."""
    written = replace(tag, language=nemo_language(tag.language))
    return str(written), None if written == tag else str(tag)


def _further_keys(record: dict[str, Any], channel: Channel, no_duration: bool) -> dict[str, Any]:
    """Return the content of ``custom``: further keys, the chosen channel, and a mark if the record has no duration."""
    # Training code reads the language from these keys, so a placeholder must not contradict the tag.
    custom = {
        key: value
        for key, value in record.items()
        if key not in _NOT_CUSTOM and not (key in ("language", "lang") and names_no_language(value))
    }
    if not (custom.get("normalized_text") or "").strip():
        # Training code uses normalized_text as the text whenever the key exists.
        custom.pop("normalized_text", None)
    stored = {key: plain_value(value) if isinstance(value, dict) else value for key, value in custom.items()}
    # Keys that are allowed one by one may be forbidden together.
    if forbidden := find_forbidden(stored):
        by_key = ((repr(key[:40]), found) for key, value in stored.items() if (found := find_forbidden(value)))
        subject, forbidden = next(by_key, ("the record", forbidden))
        raise RejectRecord("malformed", f"{subject} has {forbidden[:100]}, which is not allowed in a dataset")
    if channel is not None:
        custom["channel"] = channel
    if no_duration:
        custom[DURATION_FROM_HEADER] = True
    return custom


def parse_record(raw: RawRecord) -> dict[str, Any]:
    """Decode the JSON object of a record.

    Raises:
        RejectRecord: ``malformed`` if the line is not a valid JSON object, or is too long or nested too deeply; the
            source's own reason if the source could not read the record.
    """
    if isinstance(raw, UnreadableRecord):
        raise RejectRecord(raw.reason, raw.detail)
    line = record_text(raw)
    if len(line) > MAX_RECORD_BYTES:
        raise RejectRecord("malformed", f"the line has {len(line):,} bytes, more than {MAX_RECORD_BYTES >> 20} MiB")
    record = decode_object(line, "the line is not a JSON object")
    if line.count(b"[") + line.count(b"{") > _MAX_DEPTH and _is_deeper(record, _MAX_DEPTH):
        raise RejectRecord("malformed", f"the JSON is nested more than {_MAX_DEPTH} levels deep")
    return record


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for value in level
            if isinstance(value, (dict, list))
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    return bool(level)


def check_fields(record: dict[str, Any]) -> None:
    """Raise RejectRecord if ``audio_filepath`` is missing, or if a key has a value of the wrong type or range."""
    if "audio_filepath" not in record:
        raise RejectRecord("missing_field", "the record has no audio_filepath")
    for key, types in _TYPES.items():
        value = record.get(key)
        # pandas writes NaN for a missing speaker.
        if (value is None and key != "audio_filepath") or (key == "speaker" and is_missing(value)):
            continue
        if isinstance(value, bool) or not isinstance(value, types):
            shown = "null" if value is None else f"{str(value)[:40]!r}, {_KINDS[type(value)]}"
            raise RejectRecord("malformed", f"{key} is {shown}, not {_KINDS[types[0]]}")
    if not record["audio_filepath"].strip():
        raise RejectRecord("missing_field", "audio_filepath is empty")
    for key in ("duration", "offset"):
        if not 0 <= _seconds(record, key) <= MAX_SECONDS:
            raise RejectRecord("malformed", f"{key} is {str(record[key])[:40]}, which is not a time in seconds")


def _seconds(record: dict[str, Any], key: str) -> float:
    """Return the value of a numeric key: 0 if the key is missing, infinity if the number is too large for a float."""
    try:
        return float(record.get(key) or 0.0)
    except OverflowError:
        return math.inf
