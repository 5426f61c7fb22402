"""Places of stored audio: the bytes of each item in its file, facts from its metadata, and its hash."""

from typing import Final

import numpy as np
import xxhash

# The place of an item's data in its file, and facts from its metadata.
PLACE: Final = np.dtype(
    [("hash", "<u8", 2), ("offset", "<i8"), ("size", "<i8"), ("num_samples", "<u4"), ("sampling_rate", "<u4")]
)


def hash_segment(data: bytes | memoryview, num_samples: int, sampling_rate: int) -> tuple[int, int]:
    """Return the two halves of the xxh3-128 of stored audio; the same bytes with other metadata hash differently."""
    digest = xxhash.xxh3_128_intdigest(data, seed=sampling_rate << 32 | num_samples)
    return digest >> 64, digest & 0xFFFFFFFFFFFFFFFF


def make_place(data: bytes | memoryview, offset: int, num_samples: int, sampling_rate: int) -> tuple[object, ...]:
    """Return the values of a record of ``PLACE``."""
    return hash_segment(data, num_samples, sampling_rate), offset, len(data), num_samples, sampling_rate
