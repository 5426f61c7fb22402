"""Scores that are computed from the signal or the text alone, without a model."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from sharmill.audio.sound import measure_sound
from sharmill.scores.scorer import Clip

LOWEST_SNR: Final = -20.0
HIGHEST_SNR: Final = 100.0
_WINDOW_SECONDS: Final = 0.032
# Share of the frames in which a frequency is assumed to contain noise only. Measured with 0.1 to 0.5 on read speech in
# white and pink noise: lower shares scatter more, and higher ones underestimate high ratios.
_NOISE_SHARE: Final = 0.2
# Below this frequency there is hum and rumble, but hardly any speech.
_LOWEST_HZ: Final = 60.0


def signal_scores(clips: Sequence[Clip]) -> list[list[float]]:
    """Return the values of ``measure_sound`` and the signal-to-noise ratio of each clip."""
    found = [(clip.samples(), clip.sampling_rate) for clip in clips]
    return [[*measure_sound(*audio), estimate_snr(*audio)] for audio in found]


def estimate_snr(samples: np.ndarray, sampling_rate: int) -> float:
    """Return an estimate of the signal-to-noise ratio of audio (samples,) in dB, between -20 and 100.

    The power of the noise at each frequency is estimated from a quantile over time, because speech leaves each
    frequency free for a part of the time, even within words (Stahl, Fischer and Bippus, Quantile based noise estimation
    for spectral subtraction and Wiener filtering, ICASSP 2000). The power of Gaussian noise in a frame is distributed
    exponentially, so its mean follows from the quantile. A tone without pauses counts as noise.

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
    floor = np.partition(power, rank, axis=0)[rank]
    noise = float(floor.sum(dtype=np.float64)) / -math.log(1 - (rank + 0.5) / (len(power) + 0.5))
    speech = float(power.sum(dtype=np.float64)) / len(power) - noise
    if speech <= 0:
        return LOWEST_SNR
    ratio = 10 * math.log10(speech / noise) if noise > 0 else HIGHEST_SNR
    return min(max(ratio, LOWEST_SNR), HIGHEST_SNR)


def text_scores(clips: Sequence[Clip]) -> list[list[float | None]]:
    """Return the characters per second of each clip; None without text."""
    return [[len(clip.text) / clip.duration if clip.text and clip.duration else None] for clip in clips]
