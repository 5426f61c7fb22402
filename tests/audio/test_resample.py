"""Numbers of samples and resampling, against Lhotse."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from decimal import ROUND_HALF_UP

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.audio import RATES, container, one_torch_thread, read, speech_like, write
from support.properties import examples

from sharmill.audio.resample import resample, resample_for_encoder, resampled_length, segment_bounds
from sharmill.errors import RejectRecord


@settings(max_examples=examples(300), deadline=None)
@given(
    offset=st.floats(0, 1e5),
    duration=st.one_of(st.floats(0, 1e4), st.integers(0, 10**7).map(lambda n: n / 1000)),
    rate=st.sampled_from(RATES),
)
def test_segment_bounds_round_like_lhotse(offset, duration, rate):
    from lhotse.utils import compute_num_samples

    expected = tuple(compute_num_samples(seconds, rate, ROUND_HALF_UP) for seconds in (offset, duration))
    assert segment_bounds(offset, duration, rate) == expected


def test_segment_bounds_round_half_up():
    assert segment_bounds(0.5 / 8000, 2.5 / 8000, 8000) == (1, 3)


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_segment_bounds_refuse_what_is_no_time(bad):
    with pytest.raises(ValueError, match="not a segment"):
        segment_bounds(bad, 1.0, 8000)
    with pytest.raises(ValueError, match="not a segment"):
        segment_bounds(0.0, bad, 8000)


@pytest.mark.parametrize("from_rate", RATES)
def test_resample_equals_lhotse_bit_for_bit(tmp_path, from_rate):
    from lhotse import Recording

    path = write(tmp_path / "a.wav", container(speech_like(12345, from_rate), from_rate, "WAV", "FLOAT"))
    samples, _ = read(path)
    for to_rate in RATES:
        expected = one_torch_thread(Recording.from_file(path).resample(to_rate).load_audio)[0]
        resampled = resample(samples, from_rate, to_rate)
        assert resampled.dtype == np.float32
        np.testing.assert_array_equal(resampled, expected)


def test_resample_does_not_depend_on_threads():
    import torch

    before = torch.get_num_threads()
    samples = speech_like(30000, 16000)
    results = set()
    try:
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            results.add(hashlib.sha256(b"".join(resample(samples, 16000, r) for r in RATES)).hexdigest())
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(resample, samples, 16000, 22050) for _ in range(20)]
        assert len({job.result().tobytes() for job in jobs}) == 1
    assert len(results) == 1


def test_resample_leaves_equal_rates_and_its_input_alone():
    samples = speech_like(1000, 16000)
    assert resample(samples, 16000, 16000) is samples
    samples.flags.writeable = False
    assert len(resample(samples, 16000, 8000)) == 500


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 30000), st.sampled_from(RATES), st.sampled_from(RATES))
def test_resampled_length_is_what_resample_returns(num_samples, from_rate, to_rate):
    resampled = resample(np.zeros(num_samples, dtype=np.float32), from_rate, to_rate)
    assert len(resampled) == resampled_length(num_samples, from_rate, to_rate)


def test_resampled_length_of_long_audio():
    """torchaudio computes its own length in float32: 45,000,000 here."""
    assert resampled_length(30_000_001, 16000, 24000) == 45_000_002


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 10**9), st.sampled_from(RATES), st.sampled_from(RATES))
def test_resampled_length_is_that_of_lhotse(num_samples, from_rate, to_rate):
    from lhotse import Recording

    recording = Recording("a", [], from_rate, num_samples, num_samples / from_rate, channel_ids=[0])
    assert recording.resample(to_rate).num_samples == resampled_length(num_samples, from_rate, to_rate)


def error_db(resampling: str, frequency: float) -> float:
    """The error of a tone resampled from 22.05 to 16 kHz, against the tone at 16 kHz, away from the ends."""
    tones = [np.sin(2 * np.pi * frequency * np.arange(2 * rate) / rate).astype(np.float32) for rate in (22050, 16000)]
    found, expected = resample_for_encoder(tones[0], 22050, 16000, resampling)[4000:28000], tones[1][4000:28000]
    return 10 * np.log10(np.square(found - expected).mean() / np.square(expected).mean())


@pytest.mark.parametrize(("resampling", "worst"), [("soxr", -100), ("kaiser", -85), ("sinc", -50)])
def test_what_an_encoder_hears_has_the_error_that_the_documentation_says(resampling, worst):
    assert max(error_db(resampling, frequency) for frequency in (100, 1000, 4000)) < worst
    assert (error_db(resampling, 7000) < -60) == (resampling != "sinc")


def test_sinc_for_an_encoder_is_what_is_stored():
    samples = speech_like(30000, 22050)
    expected = resample(samples, 22050, 16000)
    np.testing.assert_array_equal(resample_for_encoder(samples, 22050, 16000, "sinc"), expected)


@pytest.mark.parametrize("resampling", ["soxr", "kaiser", "sinc"])
def test_resampling_for_an_encoder_leaves_its_input_and_equal_rates_alone(resampling):
    samples = speech_like(1000, 16000)
    samples.flags.writeable = False
    assert resample_for_encoder(samples, 16000, 16000, resampling) is samples
    found = resample_for_encoder(samples, 16000, 8000, resampling)
    assert (found.dtype, len(found)) == (np.float32, 500)
    with pytest.raises(RejectRecord, match=r"^unsupported_rate: 44101 Hz"):
        resample_for_encoder(samples, 44101, 16000, resampling)
