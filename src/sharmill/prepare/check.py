"""The checks of one record: fields, types, speaker, text, filters, file, header, duration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from sharmill.audio.files import AudioInfo, probe
from sharmill.audio.roots import AudioRoots
from sharmill.config import PrepareConfig
from sharmill.errors import RejectRecord
from sharmill.manifest import OWN_KEYS, TYPED_KEYS, AudioNotes, Utterance, parse_speaker_tag, recording_id, segment_id
from sharmill.prepare.filters import Filter
from sharmill.prepare.stats import MAX_SECONDS

_NOT_CUSTOM = {*TYPED_KEYS, *OWN_KEYS, "_skipme"}
_REQUIRED = ("audio_filepath", "duration", "speaker")
# Where the interpreter's own limit lies depends on the caller, so it would not be the same in every executor.
_MAX_DEPTH = 100
# A record this large is none, and would be carried through all stages and into the dataset.
_MAX_BYTES = 16 << 20
_TYPES: dict[str, tuple[type, ...]] = {
    "audio_filepath": (str,),
    "duration": (int, float),
    "offset": (int, float),
    "speaker": (str,),
    "text": (str,),
    "normalized_text": (str,),
}


@dataclass(frozen=True)
class RecordCheck:
    """Turns a raw record of source number ``source`` into an Utterance, or rejects it."""

    config: PrepareConfig
    filters: list[Filter]
    roots: AudioRoots
    group_key: Callable[[str, str], str]

    def __call__(self, record: dict[str, Any], source: int) -> Utterance:
        """Return the utterance of a record; raise RejectRecord with the first reason found, cheap checks first."""
        if record.get("_skipme"):
            raise RejectRecord("skipped", "the record is marked with _skipme")
        _check_fields(record)
        path = self.roots[source].relative(record["audio_filepath"])
        tag = parse_speaker_tag(record["speaker"])
        self.group_key(path, tag.speaker)
        text = self._text(record)
        for condition in self.filters:
            condition.check(record)
        self._check_duration(_seconds(record, "duration"))
        file = self.roots[source].path / path
        info = probe(file)
        _check_channels(info)
        self._check_header(record, info)
        status = file.stat()
        notes = AudioNotes(status.st_size, status.st_mtime_ns)
        return self._utterance(record, path, text, str(tag), source, notes)

    def _text(self, record: dict[str, Any]) -> str:
        for key in ("text", "normalized_text"):
            if (record.get(key) or "").strip():
                return record[key]
        if self.config.require_text:
            remedy = "prepare.require_text=false keeps such records"
            if record.get("text") is None:
                raise RejectRecord("missing_field", f"the record has neither text nor normalized_text; {remedy}")
            raise RejectRecord("empty_text", f"text is empty, and so is normalized_text; {remedy}")
        return ""

    def _check_duration(self, duration: float) -> None:
        shortest, longest = self.config.min_duration, self.config.max_duration
        if duration < shortest:
            raise RejectRecord("too_short", f"{duration:g} s is less than prepare.min_duration={shortest:g}")
        if longest is not None and duration > longest:
            raise RejectRecord("too_long", f"{duration:g} s is more than prepare.max_duration={longest:g}")

    def _check_header(self, record: dict[str, Any], info: AudioInfo) -> None:
        """Compare with the header: a record without offset has the duration of the file, a segment lies inside it."""
        seconds = info.num_samples / info.sampling_rate
        offset, duration = _seconds(record, "offset"), _seconds(record, "duration")
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

    def _utterance(
        self, record: dict[str, Any], path: str, text: str, speaker: str, source: int, notes: AudioNotes
    ) -> Utterance:
        custom = {key: value for key, value in record.items() if key not in _NOT_CUSTOM}
        if not (custom.get("normalized_text") or "").strip():
            # Training code takes it for the text wherever it is there at all.
            custom.pop("normalized_text", None)
        recording = recording_id(path)
        offset, duration = _seconds(record, "offset"), _seconds(record, "duration")
        return Utterance(
            audio_filepath=path,
            offset=offset,
            duration=duration,
            text=text,
            speaker=speaker,
            custom=custom,
            source=self.roots.first_equal(source),
            whole_file=record.get("offset") is None,
            recording_id=recording,
            cut_id=segment_id(recording, offset, duration),
            notes=notes,
        )


def parse_record(line: bytes) -> dict[str, Any]:
    """Decode the JSON object of a line.

    Raises:
        RejectRecord: ``malformed``.
    """
    if len(line) > _MAX_BYTES:
        raise RejectRecord("malformed", f"the line has {len(line):,} bytes, more than {_MAX_BYTES >> 20} MiB")
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


def _check_fields(record: dict[str, Any]) -> None:
    for key in _REQUIRED:
        if record.get(key) is None:
            raise RejectRecord("missing_field", f"the record has no {key}")
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


def _check_channels(info: AudioInfo) -> None:
    if info.channels != 1:
        raise RejectRecord("unsupported_channels", f"the audio has {info.channels} channels; only mono is supported")
