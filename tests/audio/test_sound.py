"""Measures of the sound of segments."""

from __future__ import annotations

import numpy as np
import pytest
import soxr
from support.errors import raises

from sharmill.audio.sound import Sound, measure_sound
from sharmill.errors import UnitFailed


def babble(rate: int, seconds: float = 4.0, seed: int = 0) -> np.ndarray:
    """Noise in bursts of 0.2 s with pauses between them, full band, falling by 30 dB to its top."""
    rng = np.random.default_rng(seed)
    spectrum = np.fft.rfft(rng.standard_normal(round(rate * seconds)))
    spectrum *= 10 ** (-1.5 * np.linspace(0, 1, len(spectrum)))
    bursts = (np.arange(round(rate * seconds)) // round(0.2 * rate)) % 2
    noise = np.fft.irfft(spectrum)
    return (noise / np.abs(noise).max() * 0.3 * bursts).astype(np.float32)


def low_passed(samples: np.ndarray, rate: int, top: int) -> np.ndarray:
    """Audio that was stored at a rate of twice ``top``, in 16 bits."""
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


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 24000, 44100, 48000])
def test_the_bandwidth_of_full_band_audio_is_just_below_half_the_rate(rate):
    found = measure_sound(babble(rate), rate).bandwidth
    assert rate / 2000 - 0.4 < found < rate / 2000


@pytest.mark.parametrize("top", [3000, 4000, 7000])
def test_audio_of_a_lower_rate_has_its_bandwidth(top):
    found = measure_sound(low_passed(babble(16000), 16000, top), 16000).bandwidth
    assert top / 1000 - 0.7 < found < top / 1000


def test_noise_above_the_speech_is_no_bandwidth():
    noise = np.random.default_rng(1).normal(0, 0.001, 64000).astype(np.float32)
    assert measure_sound(low_passed(babble(16000), 16000, 4000) + noise, 16000).bandwidth < 4


@pytest.mark.parametrize("samples", [np.zeros(0), np.zeros(10), np.zeros(16000)], ids=["none", "ten", "a second"])
def test_silence_has_no_bandwidth(samples):
    found = measure_sound(samples.astype(np.float32), 16000)
    assert (found.bandwidth, found.loudness, found.silence) == (0, -120, 1)


@pytest.mark.parametrize("rate", [100, 4000, 192000])
@pytest.mark.parametrize("level", [1e-6, 1e30])
def test_any_rate_and_level_can_be_packed(rate, level):
    samples = (babble(16000)[:8000] * level).astype(np.float32)
    found = Sound.unpack(measure_sound(samples, rate).pack())
    assert np.isfinite(found).all()
    assert 0 <= found.bandwidth < max(rate / 2000, 1)


def test_what_is_packed_has_a_fixed_width():
    found = [measure_sound(babble(16000) * level, 16000) for level in (0.001, 1, 10)]
    assert {len(one.pack()) for one in found} == {16}
    for one in found:
        assert Sound.unpack(one.pack()) == pytest.approx(one, abs=0.01)


@pytest.mark.parametrize("text", ["", "x", "AAAA", "A" * 20, "é" * 16])
def test_damaged_measures_are_an_error(text):
    with raises(UnitFailed, "damaged_run_dir", "the measures of a segment are damaged"):
        Sound.unpack(text)
