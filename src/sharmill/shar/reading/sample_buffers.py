"""Memory for decoded samples that is used again.

Samples of some seconds are more than the C library keeps at hand: new memory for each would be new pages each time,
which cost a third as much as decoding does.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Final

import numpy as np

# Free buffers of one size that are kept: more than threads decode at once, and than a batch has that is let go of.
_KEPT: Final = 32
_LEAST: Final = 1 << 14
# 17 minutes at 16 kHz.
_MOST: Final = 1 << 24


class SampleBuffers:
    """Free buffers of float32, by their sizes, which are powers of two; threads may take and give back."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        # How many there are of what nothing else refers to: versions of Python count differently.
        _, self._alone = _take_out({"samples": self.take(1, 1)}, "samples")

    def take(self, num_frames: int, channels: int) -> np.ndarray:
        """Return an array (num_frames, channels) of any values."""
        count = num_frames * channels
        size = max(_LEAST, 1 << max(0, count - 1).bit_length())
        if size > _MOST:
            return np.empty((num_frames, channels), np.float32)
        try:
            buffer = self._free[size].pop()
        except IndexError:
            buffer = np.empty(size, np.float32)
        return buffer[:count].reshape(num_frames, channels)

    def give_back(self, owner: dict[str, object], name: str) -> None:
        """Take an array out of a dictionary; its buffer is used again if nothing else refers to it."""
        buffer, references = _take_out(owner, name)
        # Samples of another origin have sizes of their own: kept, they would never be taken.
        if isinstance(buffer, np.ndarray) and buffer.size in self._free and references == self._alone:
            free = self._free[buffer.size]
            if buffer.flags.owndata and buffer.dtype == np.float32 and len(free) < _KEPT:
                free.append(buffer)


def _take_out(owner: dict[str, object], name: str) -> tuple[object, tuple[int, int]]:
    """Take an array out of a dictionary; return its buffer, and how many references there are to the two."""
    samples = owner.pop(name, None)
    buffer = getattr(samples, "base", None)
    return buffer, (sys.getrefcount(samples), sys.getrefcount(buffer))
