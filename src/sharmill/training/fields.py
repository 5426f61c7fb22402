"""Loads what a cut carries, be it from ``open_shar`` or from plain lhotse: codes, audio at a rate, text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sharmill.shar.layout import TARGET_AUDIO, TARGET_CODES

if TYPE_CHECKING:
    from lhotse import MonoCut, Recording

# Sources of recordings whose data has been read; a file is where the audio came from, and nothing to load.
_LOADED = ("memory", "shar")


def holds(cut: MonoCut, field: str) -> bool:
    """Whether the cut carries this field."""
    from lhotse import MonoCut

    if not isinstance(cut, MonoCut):
        raise ValueError(f"cut {cut.id!r} is a {type(cut).__name__}; batches are made of MonoCuts, without padding")
    return _recording(cut) is not None if field == TARGET_AUDIO else cut.has_custom(field)


def load_array(cut: MonoCut, field: str) -> np.ndarray:
    """Codes (codebooks, frames): the target's frames of this cut, or the whole context."""
    from lhotse.array import TemporalArray

    from sharmill.shar.arrays import TimeLastArray

    array = (cut.custom or {})[field]
    if isinstance(array, TemporalArray) and field == TARGET_CODES:
        # lhotse's own class cuts an array in memory along its codebooks.
        return TimeLastArray(**vars(array)).load(cut.start, cut.duration)
    return array.load()


def load_audio(cut: MonoCut, field: str, sampling_rate: int) -> np.ndarray:
    """Samples (time,) at ``sampling_rate``, float32: the target's part of this cut, or the whole context.

    Raises:
        ValueError: the cut does not carry it, or it has several channels.
    """
    is_target = field == TARGET_AUDIO
    recording = _recording(cut) if is_target else (cut.custom or {}).get(field)
    if recording is None:
        raise ValueError(f"cut {cut.id!r} has no {field}; name it in open_shar(..., fields=[...])")
    part = {"offset": cut.start, "duration": cut.duration} if is_target else {}
    samples = recording.resample(sampling_rate).load_audio(**part)
    if samples.shape[0] != 1:
        raise ValueError(f"the {field} of cut {cut.id!r} has {samples.shape[0]} channels; mono is needed")
    return samples[0].astype(np.float32, copy=False)


def text_of(cut: MonoCut, field: str) -> str | None:
    """The supervision's text, or what its ``custom`` has under another name."""
    supervision = cut.supervisions[0]
    return supervision.text if field == "text" else (supervision.custom or {}).get(field)


def _recording(cut: MonoCut) -> Recording | None:
    """The target's audio: the field of that name, or the cut's own recording where its data has been read."""
    if cut.has_custom(TARGET_AUDIO):
        return (cut.custom or {})[TARGET_AUDIO]
    if cut.has_recording and all(source.type in _LOADED for source in cut.recording.sources):
        return cut.recording
    return None
