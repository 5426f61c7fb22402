"""Encoding of samples as FLAC, WAV, MP3 or Opus by libsndfile."""

import io
from typing import Final

import numpy as np
import soundfile as sf

from sharmill.audio.decoder import FULL_SCALE, check_finite, to_float
from sharmill.audio.ogg import with_serial
from sharmill.errors import refuse, refuse_record

# Format -> libsndfile's format and subtype, and the sampling rates that it can write (None: any).
_ENCODINGS: Final[dict[str, tuple[str, str, tuple[int, ...] | None]]] = {
    "flac": ("FLAC", "PCM_16", None),
    "wav": ("WAV", "PCM_16", None),
    "mp3": ("MP3", "MPEG_LAYER_III", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)),
    "opus": ("OGG", "OPUS", (8000, 12000, 16000, 24000, 48000)),
}
ENCODERS: Final[tuple[str, ...]] = tuple(_ENCODINGS)
_OGG_SERIAL: Final = 1
_FLAC_MAX_ANY_RATE: Final = 65535  # higher rates must be multiples of 10 Hz


def _to_int16(samples: np.ndarray) -> np.ndarray:
    """Clip floats and round them to 16 bits, as libsndfile does for FLAC, but faster."""
    scaled = np.clip(samples, -1.0, 1.0, dtype=np.float32)
    scaled *= np.float32(FULL_SCALE)
    np.rint(scaled, out=scaled)
    return np.minimum(scaled, FULL_SCALE - 1, out=scaled).astype(np.int16)


def encoder_problem(format: str, sampling_rate: int) -> str:
    """Return why ``encode`` cannot write a format at a rate, and what to set instead; "" if it can."""
    if format not in _ENCODINGS:
        return f"audio format {format!r} cannot be written; choose one of {', '.join(ENCODERS)}"
    rates, cannot = _ENCODINGS[format][2], f"{format} cannot hold audio at {sampling_rate} Hz: set sampling_rate"
    if rates is not None and sampling_rate not in rates:
        return f"{cannot} to one of {', '.join(map(str, rates))}, or audio_format to flac"
    if format == "flac" and sampling_rate > _FLAC_MAX_ANY_RATE and sampling_rate % 10:
        return f"{cannot}, or audio_format to wav"
    return ""


def check_encoder(format: str, sampling_rate: int) -> None:
    """Raise ConfigError unless ``encode`` can write this format at this rate."""
    problem = encoder_problem(format, sampling_rate)
    refuse((problem, problem))


def count_clipped(audio: np.ndarray) -> int:
    """Return the number of samples of ``audio`` (samples,) that ``encode`` clips because they exceed full scale."""
    # Usually no sample is clipped. The minimum and maximum show that faster than a comparison of all samples.
    has_any = audio.dtype != np.int16 and max(audio.max(initial=0), -audio.min(initial=0)) > 1
    return int(np.count_nonzero(np.abs(audio) > 1)) if has_any else 0


def encode(audio: np.ndarray, sampling_rate: int, format: str, compression: float | None = None) -> bytes:
    """Encode mono ``audio`` (samples,), int16 or float, in one of the formats ``ENCODERS``.

    Floats are clipped to [-1, 1]. Equal samples are encoded to equal bytes in every process, with the same build of
    libsndfile and the same kind of CPU. flac and wav store 16 bits: audio that was decoded from 16 bits is restored
    exactly, and int16 samples are encoded to the same bytes as equal floats.

    In all four formats, ``probe_bytes`` and ``decode_bytes`` return the original rate and number of samples: mp3 states
    its delays in the Info frame, and opus in the pre-skip and the last granule position. Other readers may return more
    samples (mp3) or audio at 48 kHz (opus). libsndfile chooses a variable bit rate. For speech at 16, 24 and 48 kHz it
    is about 43, 55 and 68 kbit/s (mp3) or 28, 37 and 62 kbit/s (opus).

    Args:
        audio: the samples.
        sampling_rate: the sampling rate in Hz.
        format: the format, one of ``ENCODERS``.
        compression: libsndfile's compression level, from 0 to 1.

    Returns:
        The bytes of the encoded file.

    Raises:
        ConfigError: the format is unknown, or cannot hold the sampling rate.
        RejectRecord: empty_audio, non_finite_audio.
        ValueError: ``audio`` is not one-dimensional.
    """
    check_encoder(format, sampling_rate)
    if audio.ndim != 1:
        raise ValueError(f"expected audio of shape (samples,), got {audio.shape}")
    refuse_record((len(audio) == 0, "empty_audio", "there are no samples to encode"))
    container, subtype, _ = _ENCODINGS[format]
    if audio.dtype == np.int16:
        stored = audio if subtype == "PCM_16" else to_float(audio)
    else:
        check_finite(audio, "audio to encode")
        # libsndfile clips only in the 16-bit formats. In MP3 and Opus, values beyond full scale would remain.
        stored = _to_int16(audio) if format == "flac" else np.clip(np.asarray(audio, dtype=np.float32), -1.0, 1.0)
    buffer = io.BytesIO()
    sf.write(buffer, stored, sampling_rate, format=container, subtype=subtype, compression_level=compression)
    data = buffer.getvalue()
    return with_serial(data, _OGG_SERIAL) if container == "OGG" else data
