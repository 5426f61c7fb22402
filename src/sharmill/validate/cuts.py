"""The checks of one cut of a sharmill dataset beside the metadata of its audio. Each says what is wrong, or None."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final

from sharmill.errors import RejectRecord
from sharmill.manifest import parse_speaker_tag
from sharmill.shar.layout import CONTEXT_UNALIGNED, context_id
from sharmill.validate.agreement import record_problem

# What looking at a manifest raises that is not as it should be.
MALFORMED: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
# Similarities are stored with six decimals.
_SIMILARITY_TOLERANCE: Final = 1e-6
# Times are compared as the stage match compares them, which chose the context.
_MICROSECONDS: Final = 1_000_000


def cut_problem(cut: dict[str, Any], target: dict[str, Any]) -> str | None:
    """What is wrong with a cut beside the metadata of its target audio, in a sentence."""
    try:
        (supervision,) = cut["supervisions"]
        recording = cut["recording"]
        duration = cut["duration"]
        seconds = target["num_samples"] / target["sampling_rate"]
        if cut["start"] != 0 or supervision["start"] != 0:
            return "cut or supervision does not start at 0"
        if duration != seconds:
            return f"the cut lasts {duration} s, its audio {seconds} s"
        if supervision["duration"] != duration or recording["duration"] != duration:
            return "cut, supervision and recording last differently long"
        if target["id"] != cut["id"]:
            return f"the target audio has the id {target['id']!r}"
        if (recording["num_samples"], recording["sampling_rate"]) != (target["num_samples"], target["sampling_rate"]):
            return "recording and target audio differ in samples or rate"
        if supervision["recording_id"] != recording["id"]:
            return f"the supervision is of {supervision['recording_id']!r}, the recording is {recording['id']!r}"
        if cut["custom"][CONTEXT_UNALIGNED] is not True:
            return f"{CONTEXT_UNALIGNED} is not set, so that lhotse would cut the context"
        return speaker_problem(supervision["speaker"]) or _provenance_problem(cut, supervision, recording)
    except MALFORMED as error:
        return f"a key is absent or of the wrong type: {error!r}"


def _provenance_problem(cut: dict[str, Any], supervision: dict[str, Any], recording: dict[str, Any]) -> str | None:
    """What is wrong with the parts of a cut that say what it is and where it came from."""
    (source,) = recording["sources"]
    path = source["source"]
    if cut["type"] != "MonoCut":
        return f"it is a {cut['type']}"
    if cut["channel"] != 0 or supervision["channel"] != 0 or recording["channel_ids"] != [0]:
        return "cut, supervision or recording is not of channel 0"
    if supervision["id"] != f"sup-{cut['id']}":
        return f"the supervision has the id {supervision['id']!r}"
    if not isinstance(supervision["text"], str) or not isinstance(supervision["language"], str):
        return "the text or the language of the supervision is not text"
    # lhotse would run a command; a path may only say where the audio came from.
    if source["type"] != "file" or path.startswith("/") or (".." in path and ".." in path.split("/")):
        return f"the recording has the source {source['type']} {path!r}"
    if not cut["id"].startswith(f"cut-{recording['id']}-"):
        return f"the recording is {recording['id']!r}"
    return record_problem(cut, supervision, recording)


@lru_cache(maxsize=100_000)
def speaker_problem(tag: str) -> str | None:
    """What is wrong with a speaker tag."""
    try:
        parse_speaker_tag(tag)
    except RejectRecord as error:
        return str(error)
    return None


def context_problem(cut: dict[str, Any], context: dict[str, Any], limits: dict[str, Any]) -> str | None:
    """What is wrong with a cut beside the metadata of its context audio and the limits of the dataset."""
    try:
        custom = cut["supervisions"][0]["custom"]
        recording, offset = custom["context_recording_id"], custom["context_audio_offset"]
        duration, similarity = custom["context_audio_duration"], custom["context_speaker_similarity"]
        wanted = context_id(recording, offset, duration)
        if context["id"] != wanted:
            return f"the context audio has the id {context['id']!r} instead of {wanted!r}"
        if recording == cut["recording"]["id"] and _overlap(custom["offset"], custom["duration"], offset, duration):
            return "the context is the target itself, or overlaps it"
        if similarity < limits["min_similarity"] - _SIMILARITY_TOLERANCE:
            return f"the similarity of the context is {similarity}, less than {limits['min_similarity']}"
        if similarity > 1 + _SIMILARITY_TOLERANCE:
            return f"the similarity of the context is {similarity}, more than a cosine can be"
        if not limits["min_duration"] <= duration <= (limits["max_duration"] or math.inf):
            return f"the context lasts {duration} s, which is outside the limits"
        return None
    except MALFORMED as error:
        return f"a key is absent or of the wrong type: {error!r}"


def _overlap(offset: float, duration: float, other_offset: float, other_duration: float) -> bool:
    """Whether two segments of a recording share any time."""
    begin, end = round(offset * _MICROSECONDS), round((offset + duration) * _MICROSECONDS)
    other_begin, other_end = (
        round(other_offset * _MICROSECONDS), round((other_offset + other_duration) * _MICROSECONDS),
    )  # fmt: skip
    same = (begin, end) == (other_begin, other_end)
    return same or (begin < other_end and other_begin < end)
