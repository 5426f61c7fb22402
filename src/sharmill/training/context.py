"""The part of a context that a batch gets: a random slice in whole frames of the codec, the same for the same cut."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

# Durations are sums of floats; a frame that is missing by less than this share of it is there.
_TOLERANCE = 1e-6


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
        return max(1, math.ceil(self.min_duration / self.frame_shift - _TOLERANCE))

    @property
    def max_frames(self) -> int:
        return max(self.min_frames, math.floor(self.max_duration / self.frame_shift + _TOLERANCE))

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
