"""lhotse's manifests of cuts, recordings and arrays, and the utterance that a cut was made of.

Manifests are made as plain mappings, without lhotse's classes, which cost more than the rest of writing a cut; tests
read them with lhotse. A cut is a pure function of the record that it carries and of the length of its audio: the
checker makes it again.
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

# An object in a ``custom`` mapping that has all keys of one of these is one of lhotse's own manifests to lhotse.
_TAKEN_BY_LHOTSE: Final = ({"width"}, {"shape"}, {"array"}, {"id", "sources", "sampling_rate"})
# The suffix that the stage prepare gives to ids that would not be unique.
_ID_SUFFIX: Final = re.compile("(-[0-9a-f]{16})?")


def cut_json(utterance: Utterance, *, sampling_rate: int, num_samples: int) -> dict[str, Any]:
    """Return the MonoCut of an utterance whose stored audio has ``num_samples`` samples at ``sampling_rate``.

    ``recording`` tells where the audio came from and is nothing to load; the audio itself is in ``target_audio``.
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
        # All manifest keys, for NeMo looks for some of them here.
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
        # Makes lhotse load the whole context: it lives on another time line than the cut.
        "custom": {CONTEXT_UNALIGNED: True},
        "type": "MonoCut",
    }


def read_utterances(path: Path) -> Iterator[tuple[dict[str, Any], Utterance]]:
    """Yield the cuts of a file with the utterances that they were made of.

    Raises:
        DamagedShard: it cannot be read, or a cut does not say what it was made of.
    """
    for cut in read_cuts(path):
        try:
            yield cut, utterance_of(cut)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DamagedShard(f"{path}: a cut does not say which record it was made of: {error!r}") from error


def utterance_of(cut: dict[str, Any]) -> Utterance:
    """Return the utterance that a cut was made of: its record, with the ids that follow from it.

    Of the ids in the cut only a suffix that tells files or segments of the same name apart is taken over.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: the cut carries no record.
    """
    supervision = cut["supervisions"][0]
    custom = supervision["custom"]
    path, offset, duration, text, speaker = (custom[key] for key in TYPED_KEYS)
    stored, channel = cut["recording"]["id"], None
    recording = _with_suffix(recording_id(path), stored)
    # A record of mono audio may have a channel too, which is not part of its ids.
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
    """Return the stored id if it is the made one, with the hash behind it that makes an ambiguous id unique, or not."""
    return stored if stored.startswith(made) and _ID_SUFFIX.fullmatch(stored, len(made)) else made


@lru_cache(maxsize=100_000)
def _language(tag: str, original: str) -> str:
    """Return the language of a tag, as the record had it: ``en-US`` where the tag has ``en_US`` for NeMo."""
    language = parse_speaker_tag(tag).language
    found = re.search(r"\bLanguage:(\S+)", original)
    return found[1] if found and nemo_language(found[1]) == language else language


def plain_value(value: Any) -> Any:
    """Return a value as it is, or as JSON text where lhotse would take it for a manifest and fail to read the cut."""
    if isinstance(value, dict) and any(keys <= value.keys() for keys in _TAKEN_BY_LHOTSE):
        return msgspec.json.encode(value).decode()
    return value


def context_id(recording_id: str, offset: float, duration: float) -> str:
    """Return the id of the Recording in ``context_audio``."""
    return f"context_cut-{recording_id}-{offset:.2f}-{duration:.2f}"


def recording_json(recording_id: str, sampling_rate: int, num_samples: int) -> dict[str, Any]:
    """Return a Recording whose data lies beside it in the archive."""
    return {
        "id": recording_id,
        "sources": [{"type": "shar", "channels": [0], "source": ""}],
        "sampling_rate": sampling_rate,
        "num_samples": num_samples,
        "duration": num_samples / sampling_rate,
        "channel_ids": [0],
    }


def array_json(shape: tuple[int, ...]) -> dict[str, Any]:
    """Return an Array whose data lies beside it in the archive."""
    return {"storage_type": "shar", "storage_path": "", "storage_key": "", "shape": list(shape)}


def temporal_array_json(shape: tuple[int, ...], frame_shift: float) -> dict[str, Any]:
    """Return a TemporalArray whose last dimension is time, in frames of ``frame_shift`` seconds."""
    return {"array": array_json(shape), "temporal_dim": -1, "frame_shift": frame_shift, "start": 0}
