"""Contexts that the records of an extended manifest bring: read, found among the records, and checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharmill.audio.files import probe
from sharmill.audio.roots import AudioRoots
from sharmill.errors import RejectRecord
from sharmill.manifest import Context, Segment, Utterance, recording_id
from sharmill.match.embed import EmbeddedSegment

# A cosine that a script computed in float32 may be a little more than 1.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class GivenContext:
    """The context that a record brings, and whether its similarity is still to be computed."""

    context: Context
    needs_similarity: bool


class GivenContexts:
    """Contexts of records, with what they leave out filled in.

    Args:
        utterances: those of a unit. A context that is one of them has its texts and ids, and lies where it lies, as in
            an archive.
        roots: the audio roots of the sources. Any other context is a file below that of its record.
    """

    def __init__(self, utterances: Iterable[Utterance], roots: AudioRoots) -> None:
        self._known = {_place(one.segment): one for one in utterances}
        self._roots = roots

    def read(self, utterance: Utterance) -> GivenContext | RejectRecord | None:
        """Return the context that a record brings, why it cannot be used, or None where it brings none."""
        record = utterance.custom
        if record.get("context_audio_filepath") is None:
            return None
        try:
            return self._read(utterance, record)
        except RejectRecord as reject:
            return bad_context(reject)

    def _read(self, utterance: Utterance, record: Mapping[str, Any]) -> GivenContext:
        path = record["context_audio_filepath"]
        if not isinstance(path, str) or not path.strip():
            raise RejectRecord("malformed", f"context_audio_filepath is {str(path)[:40]!r}")
        offset = _number(record, "context_audio_offset", 0.0, math.inf)
        duration = _number(record, "context_audio_duration", 0.0, math.inf)
        similarity = _number(record, "context_speaker_similarity", -1 - _TOLERANCE, 1 + _TOLERANCE)
        texts = {key: record.get(key) for key in ("context_audio_text", "context_audio_normalized_text")}
        for key, text in texts.items():
            if not isinstance(text, str | None):
                raise RejectRecord("malformed", f"{key} is {str(text)[:40]!r}")
        segment = self._segment(utterance, path, offset, duration)
        known = self._known.get(_place(segment))
        if known is not None:
            segment = known.segment
        text, normalized = texts.values()
        context = Context(
            segment=segment,
            recording_id=known.recording_id if known else recording_id(segment.audio_filepath),
            text=text if text is not None else known.text if known else "",
            similarity=min(1.0, max(-1.0, similarity or 0.0)),
            normalized_text=normalized or (known.custom.get("normalized_text") if known else None),
        )
        return GivenContext(context, needs_similarity=similarity is None)

    def _segment(self, utterance: Utterance, path: str, offset: float | None, duration: float | None) -> Segment:
        source = next(n for n, numbers in enumerate(self._roots.numbers) if utterance.root in numbers)
        root, relative = self._roots.place(source, path)
        segment = Segment(root, relative, offset or 0.0, duration or 0.0, whole_file=offset is None)
        if duration is None:
            info = probe(self._roots.locate(segment))
            seconds = info.num_samples / info.sampling_rate - segment.offset
            if seconds <= 0:
                raise RejectRecord("duration_mismatch", f"it begins at {segment.offset:g} s, after the end of its file")
            segment = dataclasses.replace(segment, duration=seconds)
        return segment


def check_given(
    utterance: Utterance,
    own: EmbeddedSegment,
    given: GivenContext,
    found: EmbeddedSegment | RejectRecord,
    roots: AudioRoots,
) -> Context:
    """Return the context that a record brings, with its similarity and the notes about its audio.

    Args:
        own: the voice of the utterance.
        found: that of the context.

    Raises:
        RejectRecord: ``bad_context``: its audio cannot be used, overlaps the utterance, or has the same samples.
    """
    if isinstance(found, RejectRecord):
        raise bad_context(found)
    segment = given.context.segment
    overlaps = (
        utterance.offset < segment.offset + segment.duration - 1e-6
        and segment.offset < utterance.offset + utterance.duration - 1e-6
    )
    if overlaps and roots.real_name(utterance.segment) == roots.real_name(segment):
        raise RejectRecord("bad_context", "the context that the record brings is the utterance itself, or overlaps it")
    if own.content == found.content:
        raise RejectRecord("bad_context", "the context that the record brings has the same samples as the utterance")
    similarity = given.context.similarity
    if given.needs_similarity:
        similarity = round(float(np.dot(np.float64(own.embedding), np.float64(found.embedding))), 6)
    return dataclasses.replace(
        given.context, similarity=similarity, segment=dataclasses.replace(segment, notes=found.notes)
    )


def bad_context(reject: RejectRecord) -> RejectRecord:
    """Return why a record is rejected whose context would be rejected for this."""
    return RejectRecord("bad_context", f"the context that the record brings: {reject.reason}: {reject.detail}")


def _place(segment: Segment) -> Hashable:
    # Manifests round their times.
    return segment.root, segment.audio_filepath, round(segment.offset, 3), round(segment.duration, 3)


def _number(record: Mapping[str, Any], key: str, least: float, most: float) -> float | None:
    value = record.get(key)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not least <= value <= most
        or value == math.inf
    ):
        raise RejectRecord("malformed", f"{key} is {str(value)[:40]!r}")
    return float(value)
