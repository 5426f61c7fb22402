"""The data of a cut, be it from ``open_shar`` or from plain lhotse: codes, audio at a rate, text.

A batch gets a part of each context: a random slice in whole frames of the codec, the same for the same cut.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sharmill.manifest import CONTEXT_KEYS
from sharmill.shar.layout import CONTEXT_UNALIGNED, TARGET_AUDIO, TARGET_CODES

if TYPE_CHECKING:
    from lhotse import MonoCut, Recording
    from lhotse.array import TemporalArray
    from lhotse.cut import Cut

# Sources of recordings whose data has been read; a file is where the audio came from, and nothing to load.
_LOADED = ("memory", "shar")


def holds(cut: MonoCut, field: str) -> bool:
    """Return True if the cut carries this field."""
    return _recording(cut) is not None if field == TARGET_AUDIO else cut.has_custom(field)


def without_padding(cut: Cut) -> tuple[MonoCut, float]:
    """Return the cut that was padded at its end, and its seconds with the padding; another cut as it is.

    Raises:
        ValueError: the cut is padded at its begin, or mixed.
    """
    from lhotse import MonoCut
    from lhotse.cut import MixedCut, PaddingCut

    if isinstance(cut, MonoCut):
        return cut, cut.duration
    tracks = cut.tracks if isinstance(cut, MixedCut) else []
    # The tracks of a cut that was padded at its begin have the padding first.
    if tracks and isinstance(tracks[0].cut, MonoCut) and all(isinstance(one.cut, PaddingCut) for one in tracks[1:]):
        return tracks[0].cut, cut.duration
    raise ValueError(
        f"cut {cut.id!r} is a {type(cut).__name__}; batches are made of MonoCuts, which may be padded at their end "
        "(pad_min_duration with pad_direction: right)"
    )


def is_without_context(cut: MonoCut) -> bool:
    """Return True for a cut of a dataset of sharmill's that has no contexts, whatever fields were read."""
    records = [supervision.custom or {} for supervision in cut.supervisions]
    is_own = CONTEXT_UNALIGNED in (cut.custom or {})
    return is_own and not any(CONTEXT_KEYS[0] in record for record in records)


def load_array(cut: MonoCut, field: str) -> np.ndarray:
    """Return codes (codebooks, frames): the target's frames of this cut, or the whole context.

    Raises:
        ValueError: the target's audio was perturbed, which its codes cannot follow.
    """
    from sharmill.shar.reading.cuts import TimeLastArray

    if field == TARGET_CODES and (done := _perturbations(cut)):
        raise ValueError(
            f"cut {cut.id!r} was changed by {done}, and its codes were not: load audio (codes=False), or leave that out"
        )
    array = target_codes_on_time(cut) if field == TARGET_CODES else None
    if array is None:
        return (cut.custom or {})[field].load()
    if not isinstance(array, TimeLastArray):
        # lhotse's own class cuts an array in memory along its codebooks.
        array = TimeLastArray(**vars(array))
    return array.load(cut.start, cut.duration)


def target_codes_on_time(cut: MonoCut) -> TemporalArray | None:
    """Return the manifest of the target's codes, or None where it does not say when its frames are."""
    from lhotse.array import TemporalArray

    array = (cut.custom or {}).get(TARGET_CODES)
    return array if isinstance(array, TemporalArray) else None


def load_audio(cut: MonoCut, field: str, sampling_rate: int) -> np.ndarray:
    """Return samples (time,) at ``sampling_rate``, float32: the target's part of this cut, or the whole context.

    Raises:
        ValueError: the cut does not carry it, it has several channels, or it cannot follow a perturbation of the cut.
        AudioLoadingError: it cannot be decoded, or would be more audio than its bytes and its recording allow.
    """
    from sharmill.shar.reading.memory_audio import MemorySource, check_claims

    is_target = field == TARGET_AUDIO
    recording = _recording(cut) if is_target else (cut.custom or {}).get(field)
    if recording is None:
        raise ValueError(f"cut {cut.id!r} has no {field}; name it in open_shar(..., fields=[...])")
    if is_target and recording is not cut.recording and (done := _perturbations(cut)):
        raise ValueError(f"cut {cut.id!r} was changed by {done}, and its {field} was not: read it with open_shar")
    part = {"offset": cut.start, "duration": cut.duration} if is_target else {}
    for source in recording.sources:
        # Plain lhotse's; those of ``open_shar`` look themselves.
        if isinstance(source.source, bytes) and not isinstance(source, MemorySource):
            check_claims(source.source, None if recording.transforms else recording.duration, part.get("duration"))
    samples = recording.resample(sampling_rate).load_audio(**part)
    if samples.shape[0] != 1:
        raise ValueError(f"the {field} of cut {cut.id!r} has {samples.shape[0]} channels; mono is needed")
    return samples[0].astype(np.float32, copy=False)


def sampling_rate_of(cut: MonoCut) -> int:
    """Return the sampling rate of the target's audio, which the cut must carry."""
    recording = _recording(cut)
    assert recording is not None
    return int(recording.sampling_rate)


def epoch_of(cut: MonoCut) -> int:
    """Return the epoch of the cut's reader: of our ``shar_position``, or lhotse's ``shar_epoch``; else 0."""
    custom = cut.custom or {}
    position = custom.get("shar_position")
    return position[0] if position is not None else custom.get("shar_epoch", 0)


def text_of(cut: MonoCut, field: str) -> str | None:
    """Return the supervision's text, or the value that its ``custom`` has under another name."""
    supervision = cut.supervisions[0]
    return supervision.text if field == "text" else (supervision.custom or {}).get(field)


def _recording(cut: MonoCut) -> Recording | None:
    """Return the target's audio: the field of that name, or the cut's own recording where its data has been read."""
    field = (cut.custom or {}).get(TARGET_AUDIO)
    own = cut.recording
    if own is None or not all(source.type in _LOADED for source in own.sources):
        return field
    # ``open_shar`` attaches the field as the recording too, and lhotse perturbs the recording alone.
    same = field is None or all(a.source is b.source for a, b in zip(own.sources, field.sources, strict=False))
    return own if same else field


def _perturbations(cut: MonoCut) -> str:
    """Return the names of lhotse's transforms of the cut's recording, resampling apart, such as ``Speed``."""
    transforms = (cut.recording.transforms if cut.recording is not None else None) or []
    names = [one["name"] if isinstance(one, dict) else type(one).__name__ for one in transforms]
    return ", ".join(name for name in names if name != "Resample")


# Durations are sums of floats; a frame that is missing by less than this share of it is there.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class ContextLimits:
    """Limits on the seconds of a context that are taken, and the codec's frames that these are counted in.

    ``min_frames`` is ``min_duration`` rounded up to whole frames, ``max_frames`` is ``max_duration`` rounded down, but
    never below ``min_frames``.

    Raises:
        ValueError: ``min_duration`` is not positive, or above ``max_duration``, or this has no end.
    """

    min_duration: float
    max_duration: float
    frame_shift: float

    def __post_init__(self) -> None:
        if not 0 < self.min_duration <= self.max_duration < math.inf:
            raise ValueError(
                f"context_duration_min ({self.min_duration}) must be positive and not above "
                f"context_duration_max ({self.max_duration}), a number of seconds"
            )

    @property
    def min_frames(self) -> int:
        return max(1, math.ceil(self.min_duration / self.frame_shift - TOLERANCE))

    @property
    def max_frames(self) -> int:
        return max(self.min_frames, math.floor(self.max_duration / self.frame_shift + TOLERANCE))

    def draw(self, num_frames: int, key: str) -> ContextSlice:
        """Draw a slice of a context of ``num_frames`` frames; the same one for the same ``key``.

        Its length is drawn evenly between ``min_frames`` and the smaller of ``max_frames`` and ``num_frames``, then its
        place among all places. A context shorter than ``min_frames`` is repeated from its beginning to that length.
        """
        assert num_frames > 0, "a context without a frame cannot be repeated"
        draws = random.Random(key)
        length = draws.randint(self.min_frames, max(self.min_frames, min(self.max_frames, num_frames)))
        first = draws.randint(0, max(0, num_frames - length))
        return ContextSlice(first, length, num_frames, self.frame_shift)


@dataclass(frozen=True)
class ContextSlice:
    """``length`` frames, from frame ``first`` on, of a context of ``num_frames``, which starts over at its end."""

    first: int
    length: int
    num_frames: int
    frame_shift: float

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.length * self.frame_shift

    def of_frames(self, codes: np.ndarray) -> np.ndarray:
        """Return the slice of codes (codebooks, frames)."""
        return _take(codes, self.first, self.length)

    def of_samples(self, samples: np.ndarray, sampling_rate: int) -> np.ndarray:
        """Return the same seconds of samples (time,) at ``sampling_rate``.

        The context is brought to its whole frames first, with zeros behind it or, where it was rounded up at another
        rate, without its last sample: so what is repeated stays in step with the codes.
        """
        per_frame = self.frame_shift * sampling_rate
        whole = round(self.num_frames * per_frame)
        framed = np.pad(samples[:whole], (0, max(0, whole - len(samples))))
        first = round(self.first * per_frame)
        return _take(framed, first, round((self.first + self.length) * per_frame) - first)


def _take(values: np.ndarray, first: int, length: int) -> np.ndarray:
    """Return ``length`` values along the last axis from ``first`` on, starting over at the end."""
    size = values.shape[-1]
    if first + length <= size:
        return values[..., first : first + length]
    return np.take(values, np.arange(first, first + length) % size, axis=-1)
