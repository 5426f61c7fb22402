"""Audio files that are odd or bad, as bytes: one function a kind, all of two seconds unless they say otherwise."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from typing import Any

import numpy as np
import soundfile as sf

from support.shar import voice

SECONDS = 2.0
RATE = 16000
_PCM, _FLOAT = 1, 3


def container(format: str = "WAV", subtype: str = "PCM_16", *, rate: int = RATE, samples: np.ndarray | None = None,
              endian: str = "FILE", **options: Any) -> bytes:  # fmt: skip
    """A good file in a format of libsndfile."""
    samples = voice(SECONDS, rate) if samples is None else samples
    stream = io.BytesIO()
    with sf.SoundFile(
        stream, "w", rate, np.atleast_2d(samples.T).shape[0], subtype, endian, format, **options
    ) as sound:
        for start in range(0, len(samples), 4096):  # libsndfile's Vorbis encoder crashes on long writes
            sound.write(samples[start : start + 4096])
    return stream.getvalue()


def chunk(name: bytes, data: bytes, size: int | None = None) -> bytes:
    """A RIFF chunk, padded to an even length; ``size`` is what its header says instead of the truth."""
    return name + struct.pack("<I", len(data) if size is None else size) + data + bytes(len(data) % 2)


def wav(data: bytes | None = None, *, kind: int = _PCM, channels: int = 1, rate: int = RATE, bits: int = 16,
        block: int | None = None, data_size: int | None = None, before: bytes = b"",
        after: bytes = b"") -> bytes:  # fmt: skip
    """A WAV whose header says what it is told to say, with further chunks before and after the samples."""
    data = pcm() if data is None else data
    block = channels * bits // 8 if block is None else block
    header = struct.pack("<HHIIHH", kind, channels, rate, rate * block & 0xFFFFFFFF, block & 0xFFFF, bits)
    chunks = chunk(b"fmt ", header) + before + chunk(b"data", data, data_size) + after
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def pcm(seconds: float = SECONDS) -> bytes:
    """Samples of 16 bits, little end first."""
    return (voice(seconds) * 32767).astype("<i2").tobytes()


def floats(*, bad: float | None = None, gain: float = 1.0) -> bytes:
    """A WAV of 32-bit floats, one of them ``bad``."""
    samples = (voice(SECONDS) * gain).astype("<f4")
    if bad is not None:
        samples[20000] = bad
    return wav(samples.tobytes(), kind=_FLOAT, bits=32)


def several_channels(number: int, format: str = "WAV", subtype: str = "PCM_16") -> bytes:
    return container(format, subtype, samples=np.repeat(voice(SECONDS)[:, None], number, axis=1))


def cut_off(data: bytes, share: float = 0.5) -> bytes:
    """The first part of a file."""
    return data[: int(len(data) * share)]


def damaged(data: bytes, size: int = 1500) -> bytes:
    """A file with other bytes in its middle."""
    noise = np.random.default_rng(1).bytes(size)
    middle = len(data) // 2
    return data[:middle] + noise + data[middle + size :]


def flac_claiming(num_samples: int) -> bytes:
    """A FLAC whose STREAMINFO has another number of samples."""
    data = bytearray(container("FLAC"))
    data[21] = data[21] & 0xF0 | num_samples >> 32
    data[22:26] = struct.pack(">I", num_samples & 0xFFFFFFFF)
    return bytes(data)


def mp3_without_info() -> bytes:
    """An MP3 of constant bit rate without the frame that states its length."""
    data = container("MP3", "MPEG_LAYER_III", bitrate_mode="CONSTANT", compression_level=0.5)
    return data[data.find(data[:3], 4) :]


def mp3_with_picture() -> bytes:
    """An MP3 behind an ID3 tag of 300 kB."""
    size = 300_000
    coded = bytes((size >> shift) & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x04\0\0" + coded + bytes(size) + container("MP3", "MPEG_LAYER_III")


def zip_archive() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.wav", wav())
    return stream.getvalue()


def gzipped() -> bytes:
    return gzip.compress(wav(), mtime=0)


def mp4() -> bytes:
    """The beginning of a film."""
    return b"\0\0\0\x20ftypisom\0\0\x02\0isomiso2avc1mp41" + bytes(4000)


def three_hours(path: str) -> None:
    """Three hours of FLAC in less than a megabyte, written a minute at a time; in the last one somebody speaks."""
    with sf.SoundFile(path, "w", 8000, 1, "PCM_16", format="FLAC") as sound:
        for minute in range(180):
            samples = np.zeros(60 * 8000, dtype=np.float32)
            if minute == 179:
                samples[: 8000 * 10] = voice(10.0, 8000)
            sound.write(samples)
