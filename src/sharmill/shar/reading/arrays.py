"""Arrays in memory, as a reader attaches them to cuts: lhotse's manifests, with faster and more careful loading.

lhotse cuts an array that lies in memory along its first axis, whatever its ``temporal_dim`` says: of (codebooks,
frames) it would drop codebooks as soon as a cut has fewer frames than those, or is truncated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from lhotse.array import Array, TemporalArray

from sharmill.shar.npy import array_from_bytes

# A frame that is asked for by less than this share of it is not: times are sums of floats.
_TOLERANCE = 1e-6
_NPY = "memory_npy"


@dataclass(eq=False)
class MemoryArray(Array):
    """An Array that is loaded without numpy's costly look at its header; equal to lhotse's with the same content."""

    def load(self) -> np.ndarray:
        if self.storage_type != _NPY or not isinstance(self.storage_key, bytes):
            return super().load()
        # A copy, since what lies in bytes cannot be written to.
        return array_from_bytes(self.storage_key, "an array in memory").copy(order="K")

    def __eq__(self, other: object) -> bool:
        return _same_fields(self, other, Array)

    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=False)
class TimeLastArray(TemporalArray):
    """A TemporalArray with ``temporal_dim=-1`` that loads the right part of itself."""

    def load(self, start: float | None = None, duration: float | None = None) -> np.ndarray:
        """Return the codes (codebooks, frames) of ``duration`` seconds from ``start`` on; by default all.

        There are ``ceil(duration / frame_shift)`` frames, or as many as are left. What begins in the last frame has it.

        Raises:
            ValueError: ``start`` lies before the array.
        """
        array = self.array.load()
        offset = 0.0 if start is None else start - self.start
        if offset < -1e-5:
            raise ValueError(f"the array begins at {self.start} s, after {start} s")
        frames = offset / self.frame_shift
        first = math.floor(frames + 0.5)
        if first == array.shape[-1] and frames < first - _TOLERANCE:
            # The nearest beginning is behind the last frame, as for the short rest that windows leave.
            first -= 1
        if duration is None:
            return array[..., first:]
        return array[..., first : first + math.ceil(duration / self.frame_shift - _TOLERANCE)]

    def __eq__(self, other: object) -> bool:
        return _same_fields(self, other, TemporalArray)

    __hash__ = None  # type: ignore[assignment]


def _same_fields(one: object, other: object, kind: type) -> bool:
    if not isinstance(other, kind):
        return NotImplemented
    return all(getattr(one, field.name) == getattr(other, field.name) for field in fields(kind))
