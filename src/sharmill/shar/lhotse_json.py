"""The lhotse manifests in a dataset, as plain mappings: cut, supervision, recording, arrays.

Made without lhotse's classes, which cost more than the rest of writing a cut; tests read them back with lhotse.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sharmill.manifest import TYPED_KEYS, Utterance, parse_speaker_tag
from sharmill.shar.layout import CONTEXT_UNALIGNED

# An object in a ``custom`` mapping that has all keys of one of these is one of lhotse's own manifests to lhotse.
_TAKEN_BY_LHOTSE: Final = ({"width"}, {"shape"}, {"array"}, {"id", "sources", "sampling_rate"})


def cut_json(utterance: Utterance, *, sampling_rate: int, num_samples: int) -> dict[str, Any]:
    """The MonoCut of an utterance whose stored audio has ``num_samples`` samples at ``sampling_rate``.

    ``recording`` tells where the audio came from and is nothing to load; the audio itself is in ``target_audio``.
    """
    duration = num_samples / sampling_rate
    recording = recording_json(utterance.recording_id, sampling_rate, num_samples)
    recording["sources"] = [{"type": "file", "channels": [0], "source": utterance.audio_filepath}]
    return {
        "id": utterance.cut_id,
        "start": 0.0,
        "duration": duration,
        "channel": 0,
        "supervisions": [supervision_json(utterance, duration)],
        "recording": recording,
        # Makes lhotse load the whole context: it lives on another time line than the cut.
        "custom": {CONTEXT_UNALIGNED: True},
        "type": "MonoCut",
    }


def supervision_json(utterance: Utterance, duration: float) -> dict[str, Any]:
    """The one supervision of a cut. All manifest keys are under ``custom``, where NeMo looks for some of them."""
    language = parse_speaker_tag(utterance.speaker).language
    typed = {key: getattr(utterance, key) for key in TYPED_KEYS}
    further = {key: _kept(value) for key, value in utterance.further_keys().items()}
    return {
        "id": f"sup-{utterance.cut_id}",
        "recording_id": utterance.recording_id,
        "start": 0.0,
        "duration": duration,
        "channel": 0,
        "text": utterance.text,
        "language": language,
        "speaker": utterance.speaker,
        "custom": {**typed, "language": language, **further},
    }


def _kept(value: Any) -> Any:
    """A value as it is, or as JSON text where lhotse would take it for a manifest and fail to read the cut."""
    return msgspec.json.encode(value).decode() if is_taken_by_lhotse(value) else value


def is_taken_by_lhotse(value: Any) -> bool:
    """Whether lhotse makes a manifest of its own from a value in a ``custom`` mapping."""
    return isinstance(value, dict) and any(keys <= value.keys() for keys in _TAKEN_BY_LHOTSE)


def recording_json(recording_id: str, sampling_rate: int, num_samples: int) -> dict[str, Any]:
    """A Recording whose data lies beside it in the archive."""
    return {
        "id": recording_id,
        "sources": [{"type": "shar", "channels": [0], "source": ""}],
        "sampling_rate": sampling_rate,
        "num_samples": num_samples,
        "duration": num_samples / sampling_rate,
        "channel_ids": [0],
    }


def array_json(shape: tuple[int, ...]) -> dict[str, Any]:
    """An Array whose data lies beside it in the archive."""
    return {"storage_type": "shar", "storage_path": "", "storage_key": "", "shape": list(shape)}


def temporal_array_json(shape: tuple[int, ...], frame_shift: float) -> dict[str, Any]:
    """A TemporalArray whose last dimension is time, in frames of ``frame_shift`` seconds."""
    return {"array": array_json(shape), "temporal_dim": -1, "frame_shift": frame_shift, "start": 0}
