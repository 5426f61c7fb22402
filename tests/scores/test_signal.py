"""Signal scores of made signals and synthetic speech: error tables, and the effects of noise, low-pass and clipping."""

import numpy as np
import pytest
import scipy.signal

from sharmill.audio.resample import resample
from sharmill.audio.sound import measure_sound
from sharmill.demo.espeak import Espeak, VoiceSettings
from sharmill.models.silero import SileroVad
from sharmill.scores.families import Signal
from sharmill.scores.signal import estimate_snr

RATE = 16000
LEVELS = (40, 30, 20, 10, 0)


def noise(size, pink=False):
    white = np.random.default_rng(size).standard_normal(size)
    spectrum = np.fft.rfft(white)
    return np.fft.irfft(spectrum / np.sqrt(np.arange(1, len(spectrum) + 1)), size) if pink else white


def with_noise(samples, level, pink=False):
    """Return samples with noise that is ``level`` dB weaker."""
    added = noise(len(samples), pink)
    gain = np.sqrt(np.mean(samples**2) / np.mean(added**2) / 10 ** (level / 10))
    return (samples + gain * added).astype(np.float32)


def tone(pitch, rate=RATE):
    """Return six seconds of a tone, with a pause in each second."""
    time = np.arange(6 * rate) / rate
    return 0.3 * np.sin(2 * np.pi * pitch * time) * (time % 1 < 0.6)


@pytest.fixture(scope="module")
def speech():
    espeak = Espeak()
    text = "The quick brown fox jumps over the lazy dog. She sells sea shells, and watches six thick thistle sticks."
    samples = espeak.synthesize(text, VoiceSettings("en-us+f5")).astype(np.float32) / 32768
    return resample(samples, espeak.sampling_rate, RATE)


def test_the_ratio_of_made_signals_has_an_error_under_one_db():
    print("\nsignal            " + "".join(f"{level:>7} dB" for level in LEVELS))
    for name, made, pink in (
        *((f"tone {pitch} Hz", tone(pitch), False) for pitch in (150, 440, 1500)),
        ("tone, 48 kHz", tone(440, 48000), False),
        ("noise bursts", 0.1 * noise(6 * RATE + 1)[1:] * (np.arange(6 * RATE) % RATE < RATE / 2), False),
        ("tone, pink noise", tone(440), True),
    ):
        rate = 48000 if "48" in name else RATE
        errors = [estimate_snr(with_noise(made, level, pink), rate) - level for level in LEVELS]
        print(f"{name:<18}" + "".join(f"{error:>+10.1f}" for error in errors))
        # The rumble of pink noise, which no speech has, does not count.
        assert np.abs(errors).max() < (4.5 if pink else 1.0)


def test_noise_lowers_the_ratio_of_speech(speech):
    for pink in (False, True):
        found = [estimate_snr(with_noise(speech, level, pink), RATE) for level in LEVELS]
        print(f"\nspeech, {'pink' if pink else 'white'} noise: " + " ".join(f"{one:.1f}" for one in found))
        assert all(np.diff(found) < -3)
        assert np.abs(np.subtract(found, LEVELS))[1:].max() < 6


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(np.zeros(RATE, np.float32), -20.0), (np.full(1, 0.5, np.float32), -20.0), (noise(RATE) * 1e-3, -20.0),
     (tone(440).astype(np.float32), 100.0)],
)  # fmt: skip
def test_signals_without_speech_or_noise_have_limits_as_ratio(samples, expected):
    assert estimate_snr(samples, RATE) == pytest.approx(expected, abs=10)


def test_values_of_silence_are_within_the_limits_of_columns():
    silence = np.zeros(RATE, np.float32)
    values = [*measure_sound(silence, RATE), estimate_snr(silence, RATE)]
    for (column, (low, high)), value in zip(Signal.columns.items(), values, strict=True):
        assert low <= value <= high, column


def test_a_lowpass_lowers_the_bandwidth(speech):
    bursts = noise(4 * RATE) * (np.arange(4 * RATE) % RATE < RATE / 2) * 0.1
    cuts = (7000, 5000, 3500, 2000)
    for name, samples in (("bursts", bursts), ("speech", speech)):
        filters = [scipy.signal.butter(16, cut, fs=RATE, output="sos") for cut in cuts]
        found = [
            measure_sound(scipy.signal.sosfilt(one, samples).astype(np.float32), RATE).bandwidth for one in filters
        ]
        print(f"\n{name}, low-pass at {cuts} Hz: bandwidth {found} kHz")
        assert all(np.diff(found) < 0)
        if name == "bursts":
            assert np.abs(np.array(found) - np.array(cuts) / 1000).max() < 1.5


def test_clipping_and_gain_show_in_levels(speech):
    loud = speech / np.abs(speech).max()
    sounds = [measure_sound((loud * 10 ** (gain / 20)).clip(-1, 1), RATE) for gain in (-6, 6, 12, 18)]
    assert sounds[0].clipped == 0
    assert all(np.diff([sound.clipped for sound in sounds]) > 0)
    assert sounds[0].peak == pytest.approx(-6, abs=0.05)
    halves = [measure_sound(loud * gain, RATE).speech_level for gain in (0.5, 0.25)]
    assert halves[0] - halves[1] == pytest.approx(6.02, abs=0.05)


def test_pauses_and_noise_are_no_speech(speech):
    detector = SileroVad()
    quiet = (noise(len(speech)) * 0.01).astype(np.float32)
    shares = [
        (detector.speech_probabilities(samples.astype(np.float32)) > 0.5).mean()
        for samples in (speech, np.concatenate([speech, quiet]), quiet, np.zeros(RATE))
    ]
    print(f"\nshares of speech: {shares}")
    assert shares[0] > 0.6
    assert shares[1] == pytest.approx(shares[0] / 2, abs=0.1)
    assert max(shares[2:]) < 0.05
