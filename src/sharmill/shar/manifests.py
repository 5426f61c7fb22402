"""Conversion of utterances to lhotse's manifests of cuts, recordings and arrays, and of cuts back to utterances.

Manifests are built as plain mappings, because building lhotse's objects would take more time than all other steps of
writing a cut; tests read them with lhotse. A cut is a pure function of its record and the length of its audio, so the
checker can recompute it.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from sharmill.errors import DamagedShard
from sharmill.manifest import (
    ALIGNMENT,
    ORIGINAL_TAG,
    TYPED_KEYS,
    Segment,
    Utterance,
    kept_id,
    nemo_language,
    parse_speaker_tag,
    recording_id,
    segment_id,
)
from sharmill.shar.fields import CONTEXT_UNALIGNED
from sharmill.shar.json_lines import read_cuts

# lhotse mistakes an object in a ``custom`` mapping for one of its own manifests if it has all keys of one of these
# sets.
_TAKEN_BY_LHOTSE: Final = ({"width"}, {"shape"}, {"array"}, {"id", "sources", "sampling_rate"})
# The suffix that the stage prepare adds to ids that would otherwise not be unique.
_ID_SUFFIX: Final = re.compile("(-[0-9a-f]{16})?")


def cut_json(utterance: Utterance, *, sampling_rate: int, num_samples: int) -> dict[str, Any]:
    """Return the MonoCut of an utterance whose stored audio has ``num_samples`` samples at ``sampling_rate``.

    ``recording`` only names the origin of the audio and cannot be loaded; the audio itself is in ``target_audio``.
    """
    duration = num_samples / sampling_rate
    source = {"type": "file", "channels": [0], "source": utterance.segment.audio_filepath}
    language = _language(utterance.speaker, str(utterance.custom.get(ORIGINAL_TAG, "")))
    further = {key: plain_value(value) for key, value in utterance.further_keys().items() if key != ALIGNMENT}
    supervision = {
        "id": f"sup-{utterance.cut_id}",
        "recording_id": utterance.recording_id,
        "start": 0.0,
        "duration": duration,
        "channel": 0,
        "text": utterance.text,
        "language": language,
        "speaker": utterance.speaker,
        # Include all manifest keys, because NeMo reads some of them from here.
        "custom": {**utterance.typed_keys(), "language": language, **further},
        **({"alignment": utterance.custom[ALIGNMENT]} if ALIGNMENT in utterance.custom else {}),
    }
    return {
        "id": utterance.cut_id,
        "start": 0.0,
        "duration": duration,
        "channel": 0,
        "supervisions": [supervision],
        "recording": recording_json(utterance.recording_id, sampling_rate, num_samples) | {"sources": [source]},
        # Makes lhotse load the whole context, whose time line differs from the cut's.
        "custom": {CONTEXT_UNALIGNED: True},
        "type": "MonoCut",
    }


def read_utterances(path: Path) -> Iterator[tuple[dict[str, Any], Utterance]]:
    """Yield the cuts of a file, each with the utterance that it was made from.

    Raises:
        DamagedShard: the file cannot be read, or a cut does not contain the record it was made from.
    """
    for cut in read_cuts(path):
        try:
            yield cut, utterance_of(cut)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DamagedShard(f"{path}: a cut does not contain the record it was made from: {error!r}") from error


def utterance_of(cut: dict[str, Any]) -> Utterance:
    """Return the utterance that a cut was made from: its record, and the ids derived from the record.

    Stored ids are ignored except for a suffix that distinguishes files or segments of the same name.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: the cut does not contain a record.
    """
    supervision = cut["supervisions"][0]
    custom = supervision["custom"]
    path, offset, duration, text, speaker = (custom[key] for key in TYPED_KEYS)
    stored, channel = cut["recording"]["id"], None
    recording = _with_suffix(recording_id(path), stored)
    # A record of mono audio may also have a channel, which is not part of its ids.
    if "channel" in custom and recording != stored:
        channel = custom["channel"]
        recording = _with_suffix(recording_id(path, channel), stored)
    alignment = {ALIGNMENT: supervision["alignment"]} if "alignment" in supervision else {}
    return Utterance(
        Segment(0, path, offset, duration, False, channel=channel),
        text,
        speaker,
        custom={key: value for key, value in custom.items() if key not in TYPED_KEYS} | alignment,
        recording_id=recording,
        cut_id=_with_suffix(kept_id(custom) or segment_id(recording, offset, duration), cut["id"]),
    )


def _with_suffix(made: str, stored: str) -> str:
    """Return the stored id if it is ``made``, with or without the hash that makes ids unique; otherwise ``made``."""
    return stored if stored.startswith(made) and _ID_SUFFIX.fullmatch(stored, len(made)) else made


@lru_cache(maxsize=100_000)
def _language(tag: str, original: str) -> str:
    """Return the language of a speaker tag in its original spelling: ``en-US`` if the tag has NeMo's ``en_US``."""
    language = parse_speaker_tag(tag).language
    found = re.search(r"\bLanguage:(\S+)", original)
    return found[1] if found and nemo_language(found[1]) == language else language


def plain_value(value: Any) -> Any:
    """Return ``value``, or its JSON text if lhotse would mistake it for a manifest and fail to read the cut."""
    if isinstance(value, dict) and any(keys <= value.keys() for keys in _TAKEN_BY_LHOTSE):
        return msgspec.json.encode(value).decode()
    return value


def context_id(recording_id: str, offset: float, duration: float) -> str:
    """Return the id of the Recording in ``context_audio``, made from the context's recording, offset and seconds."""
    return f"context_cut-{recording_id}-{offset:.2f}-{duration:.2f}"


def recording_json(recording_id: str, sampling_rate: int, num_samples: int) -> dict[str, Any]:
    """Return the manifest of a Recording whose data is stored next to it in the archive."""
    return {
        "id": recording_id,
        "sources": [{"type": "shar", "channels": [0], "source": ""}],
        "sampling_rate": sampling_rate,
        "num_samples": num_samples,
        "duration": num_samples / sampling_rate,
        "channel_ids": [0],
    }


def array_json(shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the manifest of an Array whose data is stored next to it in the archive."""
    return {"storage_type": "shar", "storage_path": "", "storage_key": "", "shape": list(shape)}


def temporal_array_json(shape: tuple[int, ...], frame_shift: float) -> dict[str, Any]:
    """Return the manifest of a TemporalArray whose last dimension is time, in frames of ``frame_shift`` seconds."""
    return {"array": array_json(shape), "temporal_dim": -1, "frame_shift": frame_shift, "start": 0}
