"""The two forms that samples have in memory: float32 from -1 to 1, and the 16 bits that most files hold."""

from __future__ import annotations

from typing import Final

import numpy as np

_FULL_SCALE: Final = 1 << 15


def to_float(samples: np.ndarray) -> np.ndarray:
    """Return samples of any shape as float32, without a change of value; floats are returned as they are."""
    if samples.dtype != np.int16:
        return samples
    # In less time than one multiplication that converts as it goes.
    floats = samples.astype(np.float32)
    floats *= np.float32(1 / _FULL_SCALE)
    return floats


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Return floats clipped and rounded to 16 bits as libsndfile does for FLAC, in less time than it takes itself."""
    scaled = np.clip(samples, -1.0, 1.0, dtype=np.float32)
    scaled *= np.float32(_FULL_SCALE)
    np.rint(scaled, out=scaled)
    return np.minimum(scaled, _FULL_SCALE - 1, out=scaled).astype(np.int16)
