"""Shape and type of codes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.shar.arrays import codes_dtype, num_frames


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (2, "int16"),
        (1 << 15, "int16"),
        ((1 << 15) + 1, "int32"),
        (1 << 16, "int32"),
        (1 << 31, "int32"),
        ((1 << 31) + 1, "int64"),
        (1 << 63, "int64"),
    ],
)
def test_the_type_is_the_smallest_that_holds_the_codebook(size, dtype):
    assert codes_dtype(size) == np.dtype(dtype)


def test_no_type_holds_more_than_64_bits():
    with raises(ConfigError, "bad_codec"):
        codes_dtype((1 << 63) + 1)


@pytest.mark.parametrize(
    ("num_samples", "sampling_rate", "frames"),
    [(0, 16000, 0), (1, 16000, 1), (320, 16000, 1), (321, 16000, 2), (221, 22050, 1)],
)
def test_frames_are_counted_at_the_rate_of_the_codec(num_samples, sampling_rate, frames):
    codec = SimpleNamespace(sampling_rate=16000, samples_per_frame=320)
    assert num_frames({"num_samples": num_samples, "sampling_rate": sampling_rate}, codec) == frames
