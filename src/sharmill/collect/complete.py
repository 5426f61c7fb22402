"""Completion of one record of a manifest: its path, duration, channel and speaker tag, from headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from sharmill.audio.files import AudioInfo, choose_channel, probe
from sharmill.audio.roots import AudioRoots
from sharmill.collect.inputs import Input
from sharmill.config import PrepareConfig
from sharmill.errors import RejectRecord
from sharmill.manifest import TYPED_KEYS, transcript_of
from sharmill.prepare.check import check_fields, parse_record
from sharmill.sources import Unreadable
from sharmill.sources.speakers import UNDETERMINED

# Beyond it a duration is not rounded, but that of other audio.
_TOLERANCE: Final = PrepareConfig().duration_tolerance
# Segments of one recording follow one another.
_probe = lru_cache(maxsize=16)(probe)


class RecordCompletion:
    """Turns raw records of inputs into those of a manifest, with paths relative to the root of all of it."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = inputs
        self._roots = AudioRoots.of(entry.source.audio_root for entry in inputs)
        self._rules = [entry.source.speaker_rule(entry.dataset) for entry in inputs]

    def __call__(self, raw: bytes | Unreadable, number: int) -> tuple[dict[str, Any], AudioInfo]:
        """Return the completed record of a raw one of input ``number``, and the header of its audio.

        Raises:
            RejectRecord: the record, its file or its header cannot be used.
        """
        if isinstance(raw, Unreadable):
            raise RejectRecord(raw.reason, raw.detail)
        record = parse_record(raw)
        check_fields(record)
        root, below = self._roots.place(number, record["audio_filepath"])
        prefix = self._inputs[number].prefix
        path = f"{prefix}/{below}" if prefix else below
        speaker = self._speaker(record, path, number)
        info = _probe(self._roots.roots[root].path / below, whole=record.get("offset") is None)
        made = {"audio_filepath": path, **_times(record, info)}
        if text := transcript_of(record):
            made["text"] = text
        made |= speaker
        made |= {key: value for key, value in record.items() if key not in TYPED_KEYS}
        own = record.get("channel")
        channel = self._inputs[number].source.default_channel() if own is None else own
        if info.channels > 1 and channel is not None:
            made["channel"] = choose_channel(channel, info.channels)
        return made, info

    def _speaker(self, record: dict[str, Any], path: str, number: int) -> dict[str, str]:
        """Return the speaker tag; for a record without speaker the language, which stands in no tag then."""
        rule = self._rules[number]
        if (tag := rule.make_tag(record, path)) is not None:
            return {"speaker": str(tag)}
        return {} if rule.language == UNDETERMINED else {"lang": rule.language}


def _times(record: dict[str, Any], info: AudioInfo) -> dict[str, float]:
    """Return ``duration``, and ``offset`` where the record has one; of a whole file the exact duration.

    Raises:
        RejectRecord: ``duration_mismatch``, ``empty_audio``.
    """
    seconds = info.num_samples / info.sampling_rate
    offset, given = record.get("offset"), record.get("duration")
    if offset is None:
        if given is not None and abs(given - seconds) > _TOLERANCE:
            raise RejectRecord("duration_mismatch", f"the record says {given:g} s, the audio has {seconds:g} s")
        return {"duration": seconds}
    if offset >= seconds:
        raise RejectRecord("duration_mismatch", f"the segment begins at {offset:g} s, the audio has {seconds:g} s")
    duration = seconds - offset if given is None else given
    if offset + duration > seconds + _TOLERANCE:
        raise RejectRecord(
            "duration_mismatch", f"the segment ends at {offset + duration:g} s, the audio at {seconds:g} s"
        )
    if duration <= 0:
        raise RejectRecord("empty_audio", "the segment has no duration")
    return {"offset": offset, "duration": duration}
