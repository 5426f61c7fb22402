"""Scores that are computed from the signal or the text alone, without a model."""

import math
from typing import Final

import numpy as np

from sharmill.audio.sound import measure_sound
from sharmill.scores.scorer import Score, Scorer

LOWEST_SNR: Final = -20.0
HIGHEST_SNR: Final = 100.0
_WINDOW_SECONDS: Final = 0.032
# Share of the frames in which a frequency is assumed to contain only noise. Shares of 0.1 to 0.5 were compared on read
# speech in white and pink noise: with lower shares, results scatter more; with higher ones, high ratios are too low.
_NOISE_SHARE: Final = 0.2
# Share of the frames that are assumed to contain only noise, at all frequencies.
_PAUSE_SHARE: Final = 0.05
# The power of a frame of white noise, summed over its frequencies, is nearly normally distributed. With a Hann window,
# neighbouring frequencies are dependent, as if there were 1.5 times fewer. A tenth of the frames is at least 1.28
# standard deviations below the mean. The frames in ``_PAUSE_SHARE`` are about a tenth of the frames without speech.
_DEPENDENCE: Final = 1.5
_TENTH: Final = 1.28
# Below this frequency there is hum and rumble, but hardly any speech.
_LOWEST_HZ: Final = 60.0


def load_signal(scorer: Scorer, device: str) -> Score:
    """Return a scorer that gives the values of ``measure_sound`` and the signal-to-noise ratio."""
    return lambda clips: [[*measure_sound(*clip.stored), estimate_snr(*clip.stored)] for clip in clips]


def load_text(scorer: Scorer, device: str) -> Score:
    """Return a scorer that gives characters per second; clips without text have no score."""
    return lambda clips: [[len(clip.text) / clip.duration if clip.text and clip.duration else None] for clip in clips]


def estimate_snr(samples: np.ndarray, sampling_rate: int) -> float:
    """Return an estimate of the signal-to-noise ratio of audio (samples,) in dB, between -20 and 100.

    The noise at each frequency is estimated from a quantile over time, because speech leaves each frequency free for a
    part of the time, even within words (Stahl, Fischer and Bippus, Quantile based noise estimation for spectral
    subtraction and Wiener filtering, ICASSP 2000). The power of Gaussian noise at a frequency is exponentially
    distributed, so its mean follows from the quantile. Since speech takes an unknown share of the frames, this spectrum
    is then lowered to the level of the quietest frames. A tone without pauses counts as noise.

    >>> time = np.arange(64000) / 16000
    >>> tone = np.sin(2 * np.pi * 440 * time) * (np.sin(2 * np.pi * time) > 0)
    >>> noise = np.random.default_rng(0).standard_normal(64000)
    >>> round(estimate_snr(tone + np.sqrt(np.mean(tone**2) / 100) * noise, 16000))
    20
    """
    size = max(2, round(_WINDOW_SECONDS * sampling_rate))
    whole = np.pad(samples, (0, max(0, size - len(samples)))).astype(np.float32, copy=False)
    frames = np.lib.stride_tricks.sliding_window_view(whole, size)[:: size // 2]
    spectra = np.fft.rfft(frames * np.hanning(size).astype(np.float32), axis=1)
    spectra = spectra[:, math.ceil(_LOWEST_HZ * size / sampling_rate) :]
    power = spectra.real**2 + spectra.imag**2
    rank = int(_NOISE_SHARE * len(power))
    noise = np.partition(power, rank, axis=0)[rank] / -np.log(1 - (rank + 0.5) / (len(power) + 0.5), dtype=np.float32)
    levels = np.sort((power / np.maximum(noise, np.float32(1e-30))).mean(axis=1))
    quiet = levels[int(_PAUSE_SHARE * len(levels))] / (1 - _TENTH * math.sqrt(_DEPENDENCE / power.shape[1]))
    noise_power = float(noise.sum(dtype=np.float64)) * min(1.0, float(quiet))
    speech = float(power.sum(dtype=np.float64)) / len(power) - noise_power
    if speech <= 0:
        return LOWEST_SNR
    ratio = 10 * math.log10(speech / noise_power) if noise_power > 0 else HIGHEST_SNR
    return min(max(ratio, LOWEST_SNR), HIGHEST_SNR)
