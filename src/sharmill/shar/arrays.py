"""Codes in memory, whose time is the last axis.

lhotse cuts an array that lies in memory along its first axis, whatever its ``temporal_dim`` says: of (codebooks,
frames) it would drop codebooks as soon as a cut has fewer frames than those, or is truncated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from lhotse.array import TemporalArray

# A frame that is asked for by less than this share of it is not: times are sums of floats.
_TOLERANCE = 1e-6


@dataclass
class TimeLastArray(TemporalArray):
    """A TemporalArray with ``temporal_dim=-1`` that loads the right part of itself."""

    def load(self, start: float | None = None, duration: float | None = None) -> np.ndarray:
        """The codes (codebooks, frames) of ``duration`` seconds from ``start`` on; by default all.

        There are ``ceil(duration / frame_shift)`` frames, or as many as are left.

        Raises:
            ValueError: ``start`` lies before the array.
        """
        array = self.array.load()
        offset = 0.0 if start is None else start - self.start
        if offset < -1e-5:
            raise ValueError(f"the array begins at {self.start} s, after {start} s")
        first = math.floor(offset / self.frame_shift + 0.5)
        if duration is None:
            return array[..., first:]
        return array[..., first : first + math.ceil(duration / self.frame_shift - _TOLERANCE)]
