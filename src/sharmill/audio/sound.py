"""Acoustic measures, which are computed whenever a segment is decoded, and their form in manifests."""

import base64
import math
import struct
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from sharmill.errors import UnitFailed

# Samples per kHz in a frame of 32 ms. The rate is rounded to kHz, because an FFT of 706 samples takes six times as long
# as an FFT of 704.
_FRAME_SAMPLES: Final = 32
# A frame is silent if it is this much quieter than the loud frames.
_SILENCE_DB: Final = 40.0
_FLOOR_DB: Final = -120.0
_FULL_SCALE: Final = 0.999
_HIGHEST: Final = 100.0
# Maximum numbers of loud and of quiet frames, spread over the segment, for the mean spectra. Their FFTs take a few
# tenths of a millisecond.
_LOUD_FRAMES: Final = 32
_QUIET_FRAMES: Final = 16
# A band contains speech if its mean level in the loud frames is at most _BAND_DB below the strongest band, as in NeMo's
# Speech Data Processor, and at least _ABOVE_NOISE_DB above its level in the quietest frames, which are noise.
_BAND_HZ: Final = 250.0
_BAND_DB: Final = 50.0
_ABOVE_NOISE_DB: Final = 6.0
_LOUD_DB: Final = 20.0
# The quietest tenth of the frames counts as noise if it is this much quieter than the loud frames, otherwise as speech.
_PAUSE_DB: Final = 10.0
_STEPS: Final = (100, 100, 100, 30_000, 30_000, 300)
_PACKED: Final = struct.Struct("<6h")


class Sound(NamedTuple):
    """Acoustic measures of a segment.

    Attributes:
        loudness: the RMS level in dB relative to full scale.
        speech_level: the RMS level of the frames that are not silent, in dB relative to full scale.
        peak: the level of the loudest sample in dB relative to full scale.
        clipped: the share of samples at full scale.
        silence: the share of frames that are 40 dB quieter than the loud frames.
        bandwidth: the centre of the highest 250 Hz band with speech, in kHz; 0 without speech. It is always below half
            the sampling rate.
    """

    loudness: float
    speech_level: float
    peak: float
    clipped: float
    silence: float
    bandwidth: float

    def pack(self) -> str:
        """Return the quantised measures as 16 characters.

        The width is fixed, so that the lengths of manifest lines do not depend on the values.
        """
        steps = (value * step for value, step in zip(self, _STEPS, strict=True))
        return base64.b64encode(_PACKED.pack(*(round(max(-32768, min(32767, number))) for number in steps))).decode()

    @classmethod
    def unpack(cls, text: str) -> "Sound":
        """Return the measures that ``pack`` has packed.

        Raises:
            UnitFailed: the text is not a result of ``pack``.
        """
        try:
            numbers = _PACKED.unpack(base64.b64decode(text))
        except (ValueError, struct.error) as error:
            raise UnitFailed(f"the measures of a segment are damaged: {text[:40]!r}", code="damaged_run_dir") from error
        return cls(*(number / step for number, step in zip(numbers, _STEPS, strict=True)))


def measure_sound(samples: np.ndarray, sampling_rate: int) -> Sound:
    """Return the measures of audio (samples,).

    >>> measure_sound(np.full(16000, 0.1, np.float32), 16000).loudness
    -20.0
    """
    peak = max(float(samples.max(initial=0.0)), -float(samples.min(initial=0.0)))
    clipped = np.count_nonzero(np.abs(samples) >= _FULL_SCALE) if peak >= _FULL_SCALE else 0
    if peak > _HIGHEST:  # the squares of huge floats would be infinite
        samples = samples.clip(-_HIGHEST, _HIGHEST)
    size = _FRAME_SAMPLES * max(1, round(sampling_rate / 1000))
    whole = samples if len(samples) >= size else np.pad(samples, (0, size - len(samples)))
    frames = whole[: len(whole) // size * size].reshape(-1, size).astype(np.float32, copy=False)
    energy = np.einsum("ij,ij->i", frames, frames) / size
    levels = _db(energy)
    # The 95th percentile is the level of the loud frames.
    top = float(np.sort(levels)[math.ceil(0.95 * len(levels)) - 1])
    silent = levels < max(top - _SILENCE_DB, _FLOOR_DB + 1)
    power = float(np.dot(samples, samples)) / max(1, len(samples))
    return Sound(
        loudness=round(float(_db(power)), 2),
        speech_level=round(float(_db(energy[~silent].mean() if not silent.all() else 0.0)), 2),
        peak=round(float(2 * _db(peak)), 2),
        clipped=float(clipped) / max(1, len(samples)),
        silence=float(silent.mean()),
        bandwidth=_bandwidth(frames, levels, top, sampling_rate),
    )


def _bandwidth(frames: np.ndarray, levels: np.ndarray, top: float, sampling_rate: int) -> float:
    if top <= _FLOOR_DB + 1 or sampling_rate < 4 * _BAND_HZ:
        return 0.0
    speech = _band_levels(frames[_spread(np.flatnonzero(levels >= top - _LOUD_DB), _LOUD_FRAMES)], sampling_rate)
    heard = speech > speech.max() - _BAND_DB
    quiet = np.argsort(levels, kind="stable")[: max(1, len(levels) // 10)]
    if levels[quiet[-1]] < top - _PAUSE_DB:
        heard &= speech > _band_levels(frames[_spread(quiet, _QUIET_FRAMES)], sampling_rate) + _ABOVE_NOISE_DB
    found = np.flatnonzero(heard)
    return (float(found[-1]) + 0.5) * _BAND_HZ / 1000 if len(found) else 0.0


def _spread(chosen: np.ndarray, most: int) -> np.ndarray:
    return chosen[np.linspace(0, len(chosen) - 1, min(most, len(chosen))).astype(np.int64)]


def _band_levels(frames: np.ndarray, sampling_rate: int) -> np.ndarray:
    """Return the mean level in dB, over frames (frames, samples), of each band below half the sampling rate."""
    size = frames.shape[1]
    spectrum = np.fft.rfft(frames * _window(size), axis=1)
    power = (spectrum.real**2 + spectrum.imag**2).mean(axis=0)
    edges = np.rint(np.arange(int(sampling_rate / 2 / _BAND_HZ) + 1) * (_BAND_HZ * size / sampling_rate))
    edges = edges.astype(np.int64)
    sums = np.add.reduceat(power[: edges[-1]], edges[:-1])
    return np.asarray(_db(sums / np.diff(edges)))


@lru_cache(maxsize=16)
def _window(size: int) -> np.ndarray:
    return np.hanning(size).astype(np.float32)


def _db(power: np.ndarray | float) -> np.ndarray:
    return np.asarray(10 * np.log10(np.maximum(power, 10 ** (_FLOOR_DB / 10))))
