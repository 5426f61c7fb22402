"""Whether the parts of a cut of a sharmill dataset agree with each other, and whether lhotse would load what it should.

Each function says what is wrong in a sentence, or None. A key that is absent raises LookupError, as a dict does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

from sharmill.manifest import parse_speaker_tag, segment_id
from sharmill.shar.items import Item
from sharmill.shar.lhotse_json import is_taken_by_lhotse

# What sharmill writes. Further keys mean something to lhotse: data elsewhere (features), other samples (transforms).
_CUT_KEYS: Final = frozenset({"id", "start", "duration", "channel", "supervisions", "recording", "custom", "type"})
_SUPERVISION_KEYS: Final = frozenset(
    {"id", "recording_id", "start", "duration", "channel", "text", "language", "speaker", "custom"}
)
_RECORDING_KEYS: Final = frozenset({"id", "sources", "sampling_rate", "num_samples", "duration", "channel_ids"})


def record_problem(cut: dict[str, Any], supervision: dict[str, Any], recording: dict[str, Any]) -> str | None:
    """What is wrong between a cut, its supervision, its recording and the record of the manifest that it came from."""
    custom = supervision["custom"]
    (source,) = recording["sources"]
    if problem := next(_odd_keys(cut, supervision, recording), None):
        return problem
    for key in ("text", "speaker"):
        if supervision[key] != custom[key]:
            return f"the {key} of the supervision is {supervision[key]!r:.80}, that of its record {custom[key]!r:.80}"
    if supervision["language"] != _language(supervision["speaker"]):
        return f"the language is {supervision['language']!r}, the speaker is {supervision['speaker']!r}"
    if source["source"] != custom["audio_filepath"]:
        return f"the recording is of {source['source']!r}, its record is of {custom['audio_filepath']!r}"
    segment = segment_id(recording["id"], custom["offset"], custom["duration"])
    if not cut["id"].startswith(segment):
        return f"the record is of the segment {segment!r}"
    for values in (cut["custom"], custom):
        for key, value in values.items():
            if is_taken_by_lhotse(value):
                return f"{key!r} is a manifest, whose data lhotse would load from elsewhere"
    return None


def recording_problem(metadata: dict[str, Any]) -> str | None:
    """What is wrong with the keys of a Recording."""
    return next(_unlike("recording", metadata, _RECORDING_KEYS), None)


def same_audio_problem(target: Item, context: Item) -> str | None:
    """Whether the context of a cut differs from its target in more than its name."""
    if target.cut_id == context.cut_id and target.data is not None and target.data == context.data:
        return "the context audio is the target audio, byte for byte"
    return None


def _odd_keys(cut: dict[str, Any], supervision: dict[str, Any], recording: dict[str, Any]) -> Iterator[str]:
    yield from _unlike("cut", cut, _CUT_KEYS)
    yield from _unlike("supervision", supervision, _SUPERVISION_KEYS)
    yield from _unlike("recording", recording, _RECORDING_KEYS)


def _unlike(what: str, manifest: dict[str, Any], keys: frozenset[str]) -> Iterator[str]:
    if manifest.keys() != keys:
        key = min(manifest.keys() ^ keys)
        yield f"the {what} has a key {key!r}, which it should not" if key in manifest else f"the {what} has no {key!r}"


@lru_cache(maxsize=100_000)
def _language(tag: str) -> str:
    return parse_speaker_tag(tag).language
