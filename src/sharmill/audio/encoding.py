"""Encoding of samples as audio files in memory: FLAC, WAV, MP3 and Opus, the same bytes for the same samples."""

from __future__ import annotations

import io
from typing import Final

import numpy as np
import soundfile as sf

from sharmill.audio import ogg
from sharmill.audio.files import check_finite
from sharmill.audio.samples import to_float, to_int16
from sharmill.errors import ConfigError, RejectRecord

# Our name -> libsndfile's format and subtype, and the sampling rates that can be written (None: any).
_ENCODINGS: Final[dict[str, tuple[str, str, tuple[int, ...] | None]]] = {
    "flac": ("FLAC", "PCM_16", None),
    "wav": ("WAV", "PCM_16", None),
    "mp3": ("MP3", "MPEG_LAYER_III", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)),
    "opus": ("OGG", "OPUS", (8000, 12000, 16000, 24000, 48000)),
}
ENCODERS: Final[tuple[str, ...]] = tuple(_ENCODINGS)
_OGG_SERIAL: Final = 1
_FLAC_MAX_ANY_RATE: Final = 65535  # beyond, only multiples of 10 Hz


def check_encoder(format: str, sampling_rate: int) -> None:
    """Check, before any work, that ``encode`` can write this format at this rate.

    Raises:
        ConfigError: it cannot; the message says what to set instead.
    """
    if format not in _ENCODINGS:
        raise ConfigError(
            f"audio format {format!r} cannot be written; choose one of {', '.join(ENCODERS)}", code="bad_config_value"
        )
    rates = _ENCODINGS[format][2]
    if rates is not None and sampling_rate not in rates:
        raise ConfigError(
            f"{format} cannot hold audio at {sampling_rate} Hz: set sampling_rate to one of "
            f"{', '.join(map(str, rates))}, or audio_format to flac",
            code="bad_config_value",
        )
    if format == "flac" and sampling_rate > _FLAC_MAX_ANY_RATE and sampling_rate % 10:
        raise ConfigError(
            f"flac cannot hold audio at {sampling_rate} Hz: set sampling_rate, or audio_format to wav",
            code="bad_config_value",
        )


def encode(audio: np.ndarray, sampling_rate: int, format: str) -> bytes:
    """Encode mono ``audio`` (samples,) as one of ``ENCODERS``: int16, or floats, which are clipped to [-1, 1].

    Same samples, same bytes, in every process and at every time (one build of libsndfile, one kind of CPU).
    flac and wav hold 16 bits: what was decoded from 16 bits comes back exactly, and int16 gives the bytes that the
    same values as floats give. All four keep rate and number
    of samples as ``probe_bytes`` and ``decode`` report them: mp3 by the delays in its Info frame, opus by
    pre-skip and last granule position. Their bit rates are libsndfile's: variable, for speech at 16, 24 and 48 kHz
    about 43, 55 and 68 kbit/s (mp3) and 28, 37 and 62 kbit/s (opus).
    Other readers may find more samples (mp3) or 48 kHz (opus).

    Raises:
        ConfigError: unknown format, or a sampling rate that it cannot hold.
        RejectRecord: empty_audio, non_finite_audio.
        ValueError: ``audio`` is not one-dimensional.
    """
    check_encoder(format, sampling_rate)
    if audio.ndim != 1:
        raise ValueError(f"expected audio of shape (samples,), got {audio.shape}")
    if len(audio) == 0:
        raise RejectRecord("empty_audio", "there are no samples to encode")
    container, subtype, _ = _ENCODINGS[format]
    if audio.dtype == np.int16:
        stored = audio if subtype == "PCM_16" else to_float(audio)
    else:
        check_finite(audio, "audio to encode")
        # libsndfile clips for the 16-bit formats only; MP3 and Opus would keep the overshoot.
        stored = to_int16(audio) if format == "flac" else np.clip(np.asarray(audio, dtype=np.float32), -1.0, 1.0)
    buffer = io.BytesIO()
    sf.write(buffer, stored, sampling_rate, format=container, subtype=subtype)
    data = buffer.getvalue()
    return ogg.with_serial(data, _OGG_SERIAL) if container == "OGG" else data
