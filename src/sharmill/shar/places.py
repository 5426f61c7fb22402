"""Places of stored audio: each item's hash, its offset and size in the file, and its length and sampling rate."""

from typing import Final

import numpy as np
import xxhash

# The dtype of an audio item's place: the item's hash, the offset and size of its data in the file (in bytes), its
# length in samples, and its sampling rate.
PLACE: Final = np.dtype(
    [("hash", "<u8", 2), ("offset", "<i8"), ("size", "<i8"), ("num_samples", "<u4"), ("sampling_rate", "<u4")]
)


def hash_segment(data: bytes | memoryview, num_samples: int, sampling_rate: int) -> tuple[int, int]:
    """Return the two halves of the XXH3-128 hash of stored audio, which also covers its length and sampling rate."""
    digest = xxhash.xxh3_128_intdigest(data, seed=sampling_rate << 32 | num_samples)
    return digest >> 64, digest & 0xFFFFFFFFFFFFFFFF


def make_place(data: bytes | memoryview, offset: int, num_samples: int, sampling_rate: int) -> tuple[object, ...]:
    """Return the values of a ``PLACE`` record for an item whose data is at ``offset`` in its file."""
    return hash_segment(data, num_samples, sampling_rate), offset, len(data), num_samples, sampling_rate
