"""Shape and type of codes, by the codec and the audio that they are the codes of."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from sharmill.audio.resample import resampled_length
from sharmill.errors import ConfigError


class FrameRate(Protocol):
    """A codec or its record in a dataset, as far as the number of frames depends on it."""

    @property
    def sampling_rate(self) -> int: ...

    @property
    def samples_per_frame(self) -> int: ...


def num_frames(recording: dict[str, Any], codec: FrameRate) -> int:
    """Return ceil(samples at the codec's rate / samples per frame) of the audio that a Recording describes.

    Raises:
        LookupError, TypeError: it does not say how many samples there are, or at which rate.
    """
    samples, rate = recording["num_samples"], recording["sampling_rate"]
    if rate != codec.sampling_rate:
        samples = resampled_length(samples, rate, codec.sampling_rate)
    return -(-samples // codec.samples_per_frame)


def codes_dtype(codebook_size: int) -> np.dtype:
    """Return the smallest of int16, int32 and int64 that holds every code.

    Raises:
        ConfigError: none does.

    >>> codes_dtype(2016)
    dtype('int16')
    """
    for dtype in (np.int16, np.int32, np.int64):
        if codebook_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise ConfigError(f"a codebook of {codebook_size} entries is too large", code="bad_codec")
