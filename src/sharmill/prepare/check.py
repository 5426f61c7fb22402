"""The checks of one record: fields, types, speaker, text, filters, file, header, duration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec

from sharmill.audio.containers import read_member
from sharmill.audio.decoder import AudioInfo
from sharmill.audio.files import choose_channel, probe, probe_bytes
from sharmill.audio.roots import AudioRoots, normalise_path
from sharmill.errors import RejectRecord
from sharmill.manifest import (
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
    Utterance,
    kept_id,
    recording_id,
    segment_id,
    transcript_of,
)
from sharmill.prepare.config import PrepareConfig
from sharmill.prepare.filters import Filter
from sharmill.prepare.speaker_key import SpeakerKey, needs_speaker
from sharmill.prepare.stats import MAX_SECONDS
from sharmill.shar.lhotse_json import plain_value
from sharmill.shar.reading.safety import find_forbidden
from sharmill.sources.speakers import SpeakerRule
from sharmill.speaker_tag import SpeakerTag, nemo_language

_NOT_CUSTOM = {*TYPED_KEYS, *OWN_KEYS, *PLACE_KEYS, SOURCE_CUT_ID, "_skipme"}
# Where the interpreter's own limit lies depends on the caller, so it would not be the same in every executor.
_MAX_DEPTH = 100
_TYPES: dict[str, tuple[type, ...]] = {
    "audio_filepath": (str,),
    "duration": (int, float),
    "offset": (int, float),
    "speaker": (str, int),
    "text": (str,),
    "normalized_text": (str,),
}


@dataclass(frozen=True)
class RecordCheck:
    """Turns a raw record of source number ``source`` into an Utterance, or rejects it.

    ``speakers`` and ``channels`` are the rules of the sources for speaker tags, and the channels that they ask for;
    ``keep_ids`` says of which sources the ids of cuts are kept.
    """

    config: PrepareConfig
    filters: list[Filter]
    roots: AudioRoots
    speakers: Sequence[SpeakerRule]
    channels: Sequence[Channel]
    keep_ids: Sequence[bool]
    group_key: SpeakerKey

    def __call__(self, record: dict[str, Any], source: int, member: Member | None = None) -> Utterance:
        """Return the utterance of a record, whose audio is a file or a member of a container.

        Raises:
            RejectRecord: with the first reason found, cheap checks first.
        """
        if mark := record.get("_skipme"):
            reason = f": {mark[:200]}" if isinstance(mark, str) else ""
            raise RejectRecord("skipped", f"the record is marked with _skipme{reason}")
        check_fields(record)
        root, path, member = self._place(record["audio_filepath"], source, member)
        tag = self._tag(record, path, source)
        self.group_key(path, tag.speaker)
        text = self._text(record)
        for condition in self.filters:
            condition.check(record)
        offset, duration = _seconds(record, "offset"), _seconds(record, "duration")
        no_duration = record.get("duration") is None
        if not no_duration:
            self._check_duration(duration)
        file = self.roots.obtain(root, path if member is None else member.container)
        info = probe(file) if member is None else probe_bytes(read_member(file, member), path)
        channel = self._channel(record, source, info)
        if no_duration:
            duration = info.num_samples / info.sampling_rate - offset
            if duration > 0:
                self._check_duration(duration)
        self._check_header(record, offset, duration, info)
        status, (speaker, original) = file.stat(), _written(tag)
        recording, custom = recording_id(path, channel), _further_keys(record, channel, no_duration)
        if self.keep_ids[source]:
            custom[SOURCE_CUT_ID] = record[SOURCE_CUT_ID]
        return Utterance(
            audio_filepath=path,
            offset=offset,
            duration=duration,
            text=text,
            speaker=speaker,
            custom=custom if original is None else custom | {ORIGINAL_TAG: original},
            root=root,
            whole_file=record.get("offset") is None,
            recording_id=recording,
            cut_id=kept_id(custom) or segment_id(recording, offset, duration),
            notes=AudioNotes(status.st_size if member is None else member.size, status.st_mtime_ns),
            channel=channel,
            member=member,
        )

    def group(self, record: dict[str, Any], source: int, member: Member | None = None) -> str:
        """Return the key of the speaker group of a record, without a look at its audio.

        Raises:
            RejectRecord: it has none.
        """
        check_fields(record)
        _, path, _ = self._place(record["audio_filepath"], source, member)
        return self.group_key(path, self._tag(record, path, source).speaker)

    def _place(self, audio_filepath: str, source: int, member: Member | None) -> tuple[int, str, Member | None]:
        """Return the root and the normalised path of a record's audio, and its member with that of its container."""
        if member is None:
            return *self.roots.place(source, audio_filepath), None
        root, container = self.roots.place(source, member.container)
        path = normalise_path(audio_filepath)
        if not path.startswith((f"{container}/", f"{container}#")):
            raise RejectRecord("outside_root", "the name of the audio in its container leads out of that")
        return root, path, member._replace(container=container)

    def _tag(self, record: dict[str, Any], path: str, source: int) -> SpeakerTag:
        rule = self.speakers[source]
        tag = rule.make_tag(record, path)
        if tag is None and needs_speaker(self.group_key):
            raise RejectRecord(
                "missing_field",
                "the record has no speaker, of which speaker_key makes groups; give its source a speaker template, "
                "choose a speaker_key of the path, or make a dataset without contexts (match: null)",
            )
        return tag or rule.without_speaker(record)

    def _text(self, record: dict[str, Any]) -> str:
        text = transcript_of(record)
        if not text and self.config.require_text:
            if record.get("text") is None:
                raise RejectRecord("missing_field", "the record has neither text nor normalized_text")
            raise RejectRecord("empty_text", "text is empty, and so is normalized_text")
        return text

    def _channel(self, record: dict[str, Any], source: int, info: AudioInfo) -> Channel:
        """Return the channel to read; of mono audio the key ``channel`` of a record is a key like any other."""
        own = record.get("channel") if info.channels > 1 else None
        return choose_channel(self.channels[source] if own is None else own, info.channels)

    def _check_duration(self, duration: float) -> None:
        shortest, longest = self.config.min_duration, self.config.max_duration
        if duration < shortest:
            raise RejectRecord("too_short", f"{duration:g} s is less than prepare.min_duration={shortest:g}")
        if longest is not None and duration > longest:
            raise RejectRecord("too_long", f"{duration:g} s is more than prepare.max_duration={longest:g}")

    def _check_header(self, record: dict[str, Any], offset: float, duration: float, info: AudioInfo) -> None:
        """Compare with the header: a record without offset has the duration of the file, a segment lies inside it."""
        seconds = info.num_samples / info.sampling_rate
        tolerance = self.config.duration_tolerance
        if record.get("offset") is None:
            if abs(duration - seconds) > tolerance:
                raise RejectRecord(
                    "duration_mismatch", f"the manifest says {duration:g} s, the audio has {seconds:g} s"
                )
        elif offset + duration > seconds + tolerance:
            raise RejectRecord(
                "duration_mismatch",
                f"the segment ends at {offset + duration:g} s, the audio at {seconds:g} s",
            )
        elif offset >= seconds:
            raise RejectRecord("duration_mismatch", f"the segment begins after the end of the audio, {seconds:g} s")


@lru_cache(maxsize=1 << 12)
def _written(tag: SpeakerTag) -> tuple[str, str | None]:
    """Return a tag as the dataset has it, and as the record had it where that is another."""
    written = replace(tag, language=nemo_language(tag.language))
    return str(written), None if written == tag else str(tag)


def _further_keys(record: dict[str, Any], channel: Channel, no_duration: bool) -> dict[str, Any]:
    """Return the keys of a record that have no attribute, with the channel that was chosen and the note on duration."""
    custom = {key: value for key, value in record.items() if key not in _NOT_CUSTOM}
    if not (custom.get("normalized_text") or "").strip():
        # Training code takes it for the text wherever it is there at all.
        custom.pop("normalized_text", None)
    stored = {key: plain_value(value) if isinstance(value, dict) else value for key, value in custom.items()}
    # Keys side by side may make up a forbidden thing, too.
    if forbidden := find_forbidden(stored):
        by_key = ((repr(key[:40]), found) for key, value in stored.items() if (found := find_forbidden(value)))
        subject, forbidden = next(by_key, ("the record", forbidden))
        raise RejectRecord("malformed", f"{subject} has {forbidden[:100]}, which no dataset may have")
    if channel is not None:
        custom["channel"] = channel
    if no_duration:
        custom[DURATION_FROM_HEADER] = True
    return custom


def parse_record(line: bytes) -> dict[str, Any]:
    """Decode the JSON object of a line.

    Raises:
        RejectRecord: ``malformed``.
    """
    if len(line) > MAX_RECORD_BYTES:
        raise RejectRecord("malformed", f"the line has {len(line):,} bytes, more than {MAX_RECORD_BYTES >> 20} MiB")
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RejectRecord("malformed", f"the line is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise RejectRecord("malformed", "the line is not a JSON object")
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
    """Raise RejectRecord where ``audio_filepath`` is not there, or a key has a value of another type than it must."""
    if record.get("audio_filepath") is None:
        raise RejectRecord("missing_field", "the record has no audio_filepath")
    for key, types in _TYPES.items():
        value = record.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, types)):
            raise RejectRecord("malformed", f"{key} is {str(value)[:40]!r}, which has the wrong type")
    if not record["audio_filepath"].strip():
        raise RejectRecord("missing_field", "audio_filepath is empty")
    for key in ("duration", "offset"):
        if not 0 <= _seconds(record, key) <= MAX_SECONDS:
            raise RejectRecord("malformed", f"{key} is {str(record[key])[:40]}, which is not a time in seconds")


def _seconds(record: dict[str, Any], key: str) -> float:
    """Return a number of the record, 0 where it is absent; infinite where it is too large for a float."""
    try:
        return float(record.get(key) or 0.0)
    except OverflowError:
        return math.inf
