"""Acoustic measures of segments, and resampling."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from decimal import ROUND_HALF_UP

import numpy as np
import pytest
import soxr
import torch
from hypothesis import given, settings, strategies as st
from support.audio import RATES, container, read, speech_like, write
from support.project import examples

from sharmill.audio.resample import resample, resample_blocks, resampled_length, segment_bounds
from sharmill.audio.sound import measure_sound
from sharmill.errors import RejectRecord


def babble(rate: int, seconds: float = 4.0, seed: int = 0) -> np.ndarray:
    """Full-band noise in bursts of 0.2 s with pauses; its spectrum falls by 30 dB to the highest frequency."""
    rng = np.random.default_rng(seed)
    spectrum = np.fft.rfft(rng.standard_normal(round(rate * seconds)))
    spectrum *= 10 ** (-1.5 * np.linspace(0, 1, len(spectrum)))
    bursts = (np.arange(round(rate * seconds)) // round(0.2 * rate)) % 2
    noise = np.fft.irfft(spectrum)
    return (noise / np.abs(noise).max() * 0.3 * bursts).astype(np.float32)


def low_passed(samples: np.ndarray, rate: int, top: int) -> np.ndarray:
    """Audio after storage in 16 bits at a rate of twice ``top``."""
    again = soxr.resample(soxr.resample(samples, rate, 2 * top), 2 * top, rate)
    return (np.rint(again * 32768) / 32768).astype(np.float32)


def test_levels_of_a_tone_with_a_pause():
    time = np.arange(16000) / 16000
    samples = (0.1 * np.sin(2 * np.pi * 1000 * time) * (time < 0.75)).astype(np.float32)
    found = measure_sound(samples, 16000)
    assert found.loudness == pytest.approx(-20 - 3.01 - 1.25, abs=0.01)
    assert found.speech_level == pytest.approx(-20 - 3.01, abs=0.2)
    assert found.peak == pytest.approx(-20, abs=0.1)
    assert found.silence == pytest.approx(0.25, abs=0.03)
    assert found.clipped == 0
    assert 1 < found.bandwidth < 2


def test_samples_at_full_scale_are_clipped():
    samples = np.clip(babble(16000) * 20, -1, 1)
    found = measure_sound(samples, 16000)
    assert found.clipped == pytest.approx(float(np.mean(np.abs(samples) == 1)), abs=0.001)
    assert found.peak == 0


FULL_BAND = [(babble(rate), rate, rate // 2, 0.4) for rate in (8000, 16000, 22050, 24000, 44100, 48000)]
OF_LOWER_RATES = [(low_passed(babble(16000), 16000, top), 16000, top, 0.7) for top in (3000, 4000, 7000)]


@pytest.mark.parametrize(("samples", "rate", "top", "below"), [*FULL_BAND, *OF_LOWER_RATES])
def test_the_bandwidth_is_just_below_the_highest_frequency(samples, rate, top, below):
    assert top / 1000 - below < measure_sound(samples, rate).bandwidth < top / 1000


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


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("times", [lambda bad: (bad, 1.0), lambda bad: (0.0, bad)], ids=["offset", "duration"])
def test_segment_bounds_refuse_invalid_times(bad, times):
    with pytest.raises(ValueError, match="not a segment"):
        segment_bounds(*times(bad), 8000)


@pytest.fixture
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("from_rate", RATES)
def test_resample_equals_lhotse_bit_for_bit(tmp_path, one_torch_thread, from_rate):
    from lhotse import Recording

    path = write(tmp_path / "a.wav", container(speech_like(12345, from_rate), from_rate, "WAV", "FLOAT"))
    samples, _ = read(path)
    for to_rate in RATES:
        expected = Recording.from_file(path).resample(to_rate).load_audio()[0]
        resampled = resample(samples, from_rate, to_rate)
        assert resampled.dtype == np.float32
        np.testing.assert_array_equal(resampled, expected)


def test_resample_does_not_depend_on_threads(one_torch_thread):
    samples = speech_like(30000, 16000)
    results = set()
    for num_threads in (1, 2, 3, 8):
        torch.set_num_threads(num_threads)
        results.add(hashlib.sha256(b"".join(resample(samples, 16000, r) for r in RATES)).hexdigest())
        assert torch.get_num_threads() == num_threads
    torch.set_num_threads(1)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(resample, samples, 16000, 22050) for _ in range(20)]
        assert len({job.result().tobytes() for job in jobs}) == 1
    assert len(results) == 1


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 30000), st.sampled_from(RATES), st.sampled_from(RATES))
def test_resampled_length_matches_resample(num_samples, from_rate, to_rate):
    resampled = resample(np.zeros(num_samples, dtype=np.float32), from_rate, to_rate)
    assert len(resampled) == resampled_length(num_samples, from_rate, to_rate)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 10**9), st.sampled_from(RATES), st.sampled_from(RATES))
def test_resampled_length_matches_lhotse(num_samples, from_rate, to_rate):
    from lhotse import Recording

    recording = Recording("a", [], from_rate, num_samples, num_samples / from_rate, channel_ids=[0])
    assert recording.resample(to_rate).num_samples == resampled_length(num_samples, from_rate, to_rate)


def error_db(resampling: str, frequency: float) -> float:
    """Return the error of a tone resampled from 22.05 to 16 kHz, compared with a tone at 16 kHz, without the ends."""
    tones = [np.sin(2 * np.pi * frequency * np.arange(2 * rate) / rate).astype(np.float32) for rate in (22050, 16000)]
    found, expected = resample(tones[0], 22050, 16000, resampling)[4000:28000], tones[1][4000:28000]
    return 10 * np.log10(np.square(found - expected).mean() / np.square(expected).mean())


@pytest.mark.parametrize(("resampling", "worst"), [("soxr", -100), ("kaiser", -85), ("sinc", -50)])
def test_resampling_for_an_encoder_has_the_documented_error(resampling, worst):
    assert max(error_db(resampling, frequency) for frequency in (100, 1000, 4000)) < worst
    assert (error_db(resampling, 7000) < -60) == (resampling != "sinc")


@pytest.mark.parametrize("resampling", ["soxr", "kaiser", "sinc"])
def test_resampling_for_an_encoder_keeps_input_and_equal_rates(resampling):
    samples = speech_like(1000, 16000)
    samples.flags.writeable = False
    assert resample(samples, 16000, 16000, resampling) is samples
    found = resample(samples, 16000, 8000, resampling)
    assert (found.dtype, len(found)) == (np.float32, 500)
    with pytest.raises(RejectRecord, match=r"^unsupported_rate: 44101 Hz"):
        resample(samples, 44101, 16000, resampling)


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_blocks_are_resampled_as_the_whole(rate):
    audio = np.random.default_rng(0).standard_normal(3 * rate).astype(np.float32)
    blocks = np.split(audio, [1, 1000, 1000, 2 * rate])
    found = np.concatenate(list(resample_blocks(blocks, rate, 16000)))
    np.testing.assert_array_equal(found, resample(audio, rate, 16000, "soxr"))
