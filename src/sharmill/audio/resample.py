"""Resampling, and conversion of times and rates to numbers of samples, with the same results as Lhotse.

Audio for a dataset or a codec is resampled as in Lhotse, so that training gets the same samples from the same
recording. Audio for a speaker encoder is not stored, and is resampled more accurately by default.
"""

import math
from collections.abc import Iterable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np

from sharmill.errors import RejectRecord

Resampling = Literal["soxr", "kaiser", "sinc"]
# Packages whose versions affect the samples, by resampling method.
RESAMPLING_PACKAGES: Final[dict[Resampling, tuple[str, ...]]] = {
    "soxr": ("numpy", "soxr"),
    "kaiser": ("numpy", "torch", "torchaudio"),
    "sinc": ("numpy", "torch", "torchaudio"),
}

_MAX_FILTER_SIZE: Final = 1 << 23
# torchaudio's parameters for librosa's kaiser_best.
_KAISER: Final = {
    "resampling_method": "sinc_interp_kaiser",
    "lowpass_filter_width": 64,
    "rolloff": 0.9475937167399596,
    "beta": 14.769656459379492,
}


def segment_bounds(offset: float, duration: float, sampling_rate: int) -> tuple[int, int]:
    """Return the first sample and the number of samples of a segment given in seconds, each rounded as in Lhotse.

    Raises:
        ValueError: ``offset`` or ``duration`` is negative or not finite.
    """
    if not (0 <= offset < math.inf and 0 <= duration < math.inf):
        raise ValueError(f"not a segment: offset {offset}, duration {duration}")
    return _round_half_up(offset * sampling_rate), _round_half_up(duration * sampling_rate)


def resampled_length(num_samples: int, from_rate: int, to_rate: int) -> int:
    """Return the number of samples that ``resample`` returns for ``num_samples``; it may be 0 for very short audio."""
    if from_rate == to_rate:
        return num_samples
    # Lhotse's Recording.resample also converts to seconds in floating point.
    return _round_half_up(num_samples / from_rate * to_rate)


def resample(audio: np.ndarray, from_rate: int, to_rate: int, resampling: Resampling = "sinc") -> np.ndarray:
    """Resample float32 ``audio`` (samples,); return it unchanged if the rates are equal.

    ``sinc`` is torchaudio's default windowed sinc. Its samples equal Lhotse's
    ``Recording.resample(to_rate).load_audio()`` in a process with one torch thread, such as a DataLoader worker.
    ``kaiser`` is a sinc with a Kaiser window and 64 zero crossings. ``soxr`` is libsoxr at high quality.

    Returns:
        float32 samples (resampled_length(len(audio), from_rate, to_rate),); with ``soxr`` possibly one more or fewer.

    Raises:
        RejectRecord: ``unsupported_rate``, if the rates have no small common ratio.
    """
    if from_rate == to_rate or len(audio) == 0:
        return audio
    # The filter has one phase for each output sample until samples of both rates coincide again. Without a common
    # divisor, it would take gigabytes. soxr would not need them, but the stages after match do not use soxr.
    divisor = math.gcd(from_rate, to_rate)
    if (from_rate // divisor) * (to_rate // divisor) > _MAX_FILTER_SIZE:
        raise RejectRecord("unsupported_rate", f"{from_rate} Hz and {to_rate} Hz have no small common ratio")
    if resampling == "soxr":
        import soxr

        return soxr.resample(audio, from_rate, to_rate, quality="HQ")
    import torch

    waveform = torch.from_numpy(np.require(audio, np.float32, ["C", "W"]))[None]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the number of threads affects the last bits of a convolution's results
    try:
        with torch.no_grad():
            resampled = _resampler(from_rate, to_rate, resampling)(waveform)[0].numpy()
    finally:
        torch.set_num_threads(num_threads)
    length = resampled_length(len(audio), from_rate, to_rate)
    if len(resampled) < length:  # torchaudio's float32 length is too short above about 2**24 samples
        return np.pad(resampled, (0, length - len(resampled)), mode="reflect")
    return resampled[:length]


def resample_blocks(blocks: Iterable[np.ndarray], from_rate: int, to_rate: int) -> Iterator[np.ndarray]:
    """Yield the samples that ``resample`` with ``soxr`` returns for consecutive blocks, in blocks of other lengths."""
    if from_rate == to_rate:
        yield from blocks
        return
    import soxr

    stream = soxr.ResampleStream(from_rate, to_rate, 1, dtype="float32", quality="HQ")
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)


def _round_half_up(num_samples: float) -> int:
    """Round as Lhotse's ``compute_num_samples`` does; importing it would load torch."""
    return int(Decimal(round(num_samples, ndigits=8)).quantize(Decimal(0), rounding=ROUND_HALF_UP))


@lru_cache(maxsize=16)
def _resampler(from_rate: int, to_rate: int, window: Literal["kaiser", "sinc"]) -> Any:
    import torchaudio

    options: dict[str, Any] = _KAISER if window == "kaiser" else {}
    return torchaudio.transforms.Resample(from_rate, to_rate, **options)
