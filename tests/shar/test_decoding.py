"""FLAC by dr_flac: the samples of libsndfile, and whatever is not whole is left to libsndfile."""

from __future__ import annotations

import io
from unittest import mock

import numpy as np
import pytest
import soundfile as sf

from sharmill.shar.reading.decoding import decode


def flac(num_samples: int, channels: int = 1, rate: int = 16000, subtype: str = "PCM_16") -> bytes:
    stream = io.BytesIO()
    samples = 0.2 * np.random.default_rng(num_samples).normal(size=(num_samples, channels))
    sf.write(stream, samples, rate, format="FLAC", subtype=subtype)
    return stream.getvalue()


def by_libsndfile(data: bytes) -> np.ndarray:
    with sf.SoundFile(io.BytesIO(data)) as sound:
        return sound.read(dtype=np.float32, always_2d=True).T


def outcome(decoder, data: bytes) -> object:
    """The samples, or that they are refused."""
    try:
        samples = decoder(data)
    except (RuntimeError, TypeError):
        return "refused"
    return samples.shape, samples.tobytes()


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
@pytest.mark.parametrize(("channels", "rate"), [(1, 16000), (2, 44100), (3, 22050), (8, 96000)])
def test_the_samples_are_those_of_libsndfile(subtype, channels, rate):
    for num_samples in (1, 17, 4096, 20000):
        data = flac(num_samples, channels, rate, subtype)
        expected = by_libsndfile(data)
        for _ in range(2):  # the first may be by libsndfile itself
            found = decode(data)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, expected)


def test_libsndfile_is_asked_once_about_the_same_metadata():
    first, second = flac(100), flac(5000)
    decode(first)
    with mock.patch.object(sf, "SoundFile", side_effect=AssertionError("asked again")):
        assert decode(second).shape == (1, 5000)


def test_of_damaged_files_the_same_is_refused():
    data = flac(9000)
    decode(data)
    rng = np.random.default_rng(0)
    refused = 0
    for change in range(1200):
        damaged = bytearray(data)
        if change % 5 == 4:
            damaged = damaged[: rng.integers(26, len(data))]
        else:
            # Most of them in what comes before the first frame.
            damaged[rng.integers(4, 200 if change % 2 else len(data))] ^= 1 << int(rng.integers(8))
        # A claim of more samples than there are bytes for is refused before anything is decoded.
        damaged[21:24] = data[21:24]
        expected = outcome(by_libsndfile, bytes(damaged))
        refused += expected == "refused"
        assert outcome(decode, bytes(damaged)) == expected, change
    assert refused > 100
