"""Resampling, and the number of samples that times and other rates come to, as Lhotse computes them.

Audio that is stored or goes into a codec is resampled as Lhotse does it, so that training makes the same samples of the
same recording. Audio for a speaker encoder is stored nowhere, and is resampled with less error by default.
"""

import math
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np

from sharmill.errors import RejectRecord

Resampling = Literal["soxr", "kaiser", "sinc"]
# Packages whose versions the samples depend on, by the way of resampling.
RESAMPLING_PACKAGES: Final[dict[Resampling, tuple[str, ...]]] = {
    "soxr": ("numpy", "soxr"),
    "kaiser": ("numpy", "torch", "torchaudio"),
    "sinc": ("numpy", "torch", "torchaudio"),
}

_MAX_FILTER_SIZE: Final = 1 << 23
# torchaudio's parameters for what librosa calls kaiser_best.
_KAISER: Final = {
    "resampling_method": "sinc_interp_kaiser",
    "lowpass_filter_width": 64,
    "rolloff": 0.9475937167399596,
    "beta": 14.769656459379492,
}


def segment_bounds(offset: float, duration: float, sampling_rate: int) -> tuple[int, int]:
    """Return first sample and number of samples of a segment given in seconds; each is rounded as Lhotse rounds it.

    Raises:
        ValueError: ``offset`` or ``duration`` is negative or not finite.
    """
    if not (0 <= offset < math.inf and 0 <= duration < math.inf):
        raise ValueError(f"not a segment: offset {offset}, duration {duration}")
    return _round_half_up(offset * sampling_rate), _round_half_up(duration * sampling_rate)


def resampled_length(num_samples: int, from_rate: int, to_rate: int) -> int:
    """Return the number of samples that ``resample`` makes of ``num_samples``; of a handful it can make 0."""
    if from_rate == to_rate:
        return num_samples
    # Through seconds in floating point, since that is how Lhotse's Recording.resample computes it.
    return _round_half_up(num_samples / from_rate * to_rate)


def resample(audio: np.ndarray, from_rate: int, to_rate: int, resampling: Resampling = "sinc") -> np.ndarray:
    """Resample float32 ``audio`` (samples,); no-op for equal rates.

    ``sinc`` is torchaudio's default windowed sinc: the samples and their number are those of Lhotse's
    ``Recording.resample(to_rate).load_audio()`` in a process with one torch thread, such as a DataLoader worker.
    ``kaiser`` has a Kaiser window and 64 zero crossings; ``soxr`` is libsoxr at its high quality.

    Returns:
        float32 samples (resampled_length(len(audio), from_rate, to_rate),); of ``soxr``, give or take one.
    """
    if from_rate == to_rate or len(audio) == 0:
        return audio
    # The filter has a phase for every output sample until the rates meet again, which without a common divisor is late:
    # it would take gigabytes. soxr could, but not the stages after match.
    divisor = math.gcd(from_rate, to_rate)
    if (from_rate // divisor) * (to_rate // divisor) > _MAX_FILTER_SIZE:
        raise RejectRecord("unsupported_rate", f"{from_rate} Hz and {to_rate} Hz have no small common ratio")
    if resampling == "soxr":
        import soxr

        return soxr.resample(audio, from_rate, to_rate, quality="HQ")
    import torch

    waveform = torch.from_numpy(np.require(audio, np.float32, ["C", "W"]))[None]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the last bits of a convolution depend on the number of threads
    try:
        with torch.no_grad():
            resampled = _resampler(from_rate, to_rate, resampling)(waveform)[0].numpy()
    finally:
        torch.set_num_threads(num_threads)
    length = resampled_length(len(audio), from_rate, to_rate)
    if len(resampled) < length:  # torchaudio computes its length in float32: short above some 2**24 samples
        return np.pad(resampled, (0, length - len(resampled)), mode="reflect")
    return resampled[:length]


def _round_half_up(num_samples: float) -> int:
    """Round as Lhotse's ``compute_num_samples``, which cannot be imported without torch."""
    return int(Decimal(round(num_samples, ndigits=8)).quantize(Decimal(0), rounding=ROUND_HALF_UP))


@lru_cache(maxsize=16)
def _resampler(from_rate: int, to_rate: int, window: Literal["kaiser", "sinc"]) -> Any:
    import torchaudio

    options: dict[str, Any] = _KAISER if window == "kaiser" else {}
    return torchaudio.transforms.Resample(from_rate, to_rate, **options)
