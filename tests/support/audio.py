"""Synthetic audio for tests: samples, and good, odd and bad files as bytes."""

import io
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf

from sharmill.audio.files import open_recording
from sharmill.errors import RejectRecord
from support.project import voice

RATES = (8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000)
FORMATS = [
    ("wav", "WAV", "PCM_16"),
    ("flac", "FLAC", "PCM_16"),
    ("mp3", "MP3", "MPEG_LAYER_III"),
    ("opus", "OGG", "OPUS"),
    ("ogg", "OGG", "VORBIS"),
    ("aiff", "AIFF", "PCM_16"),
]


def speech_like(num_samples: int, sampling_rate: int, seed: int = 0) -> np.ndarray:
    """A gliding tone that comes and goes over noise, so that every position of a file sounds different."""
    t = np.arange(num_samples) / sampling_rate
    noise = np.random.default_rng(seed).standard_normal(num_samples)
    tone = np.sin(2 * np.pi * (200 + 40 * np.sin(t)) * t) * (np.sin(3 * t) > -0.5)
    return (0.3 * tone + 0.02 * noise).astype(np.float32)


def container(samples: np.ndarray, rate: int, format: str, subtype: str = "PCM_16", **options: Any) -> bytes:
    """Return a file in a format of libsndfile."""
    buffer = io.BytesIO()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with sf.SoundFile(
        buffer, "w", samplerate=rate, channels=channels, format=format, subtype=subtype, **options
    ) as sound:
        for start in range(0, len(samples), 4096):  # libsndfile's Vorbis encoder crashes on long writes
            sound.write(samples[start : start + 4096])
    return buffer.getvalue()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def reason_of(function, *arguments) -> str:
    with pytest.raises(RejectRecord) as caught:
        function(*arguments)
    assert caught.value.detail
    assert "0x" not in caught.value.detail
    assert "Unspecified" not in caught.value.detail
    return caught.value.reason


def read(path, start=0, num_samples=None, channel=None) -> tuple[np.ndarray, int]:
    """Return the samples of a file or of a part of it, and the sampling rate."""
    with open_recording(path) as recording:
        return recording.read(start, num_samples, channel), recording.info.sampling_rate


# Files of FFmpeg


@dataclass(frozen=True)
class Form:
    """A container and a codec.

    Attributes:
        format: that ``AudioInfo`` names.
        rate: that it is encoded at; Opus always decodes to 48 kHz.
        error: largest difference from what was encoded, of samples in [-1, 1]; None for codecs that keep no samples.
    """

    name: str
    muxer: str
    codec: str
    format: str
    rate: int = 16000
    channels: int = 1
    error: float | None = None
    options: dict[str, str] = field(default_factory=dict)


FORMS = [
    Form("m4a", "ipod", "aac", "aac"),
    Form("m4a in fragments", "ipod", "aac", "aac", rate=44100, options={"movflags": "frag_keyframe+empty_moov"}),
    Form("m4a of two channels", "ipod", "aac", "aac", channels=2),
    Form("alac", "ipod", "alac", "alac", rate=48000, error=4e-5),
    Form("adts", "adts", "aac", "aac"),
    Form("wma 2", "asf", "wmav2", "wma", rate=22050),
    Form("wma 1", "asf", "wmav1", "wma", rate=44100, channels=2),
    Form("webm", "webm", "libopus", "opus", rate=48000),
    Form("amr", "amr", "libopencore_amrnb", "amr", rate=8000),
    Form("3gp", "3gp", "libopencore_amrnb", "amr", rate=8000),
    Form("mp4 of mp3", "mp4", "libmp3lame", "mp3"),
    Form("mov of 16 bits", "mov", "pcm_s16le", "pcm_s16le", error=4e-5),
    Form("mov of 24 bits", "mov", "pcm_s24le", "pcm_s24le", rate=96000, error=4e-5),
    Form("mka of flac", "matroska", "flac", "flac", rate=192000, error=4e-5),
    Form("wav of g722", "wav", "g722", "g722"),
    Form("wav of g726", "wav", "g726", "g726", rate=8000),
    Form("mka of floats", "matroska", "pcm_f32le", "pcm_f32le", error=4e-5),
]


def encode(form: Form, samples: np.ndarray | None = None) -> bytes:
    """Encode samples (n,) or (n, channels), by default three seconds and a bit."""
    import av

    samples = some_samples(form) if samples is None else samples
    pcm = np.round(samples.reshape(len(samples), -1) * 32767).astype("<i2")
    layout = "stereo" if form.channels == 2 else "mono"
    stream = io.BytesIO()
    with av.open(stream, "w", format=form.muxer, options=form.options) as out:
        track = out.add_stream(form.codec, rate=form.rate, layout=layout)
        if form.codec.startswith(("wma", "g726")):
            track.bit_rate = 32000 if form.codec == "g726" else 64000
        frame = av.AudioFrame.from_ndarray(pcm.reshape(1, -1), format="s16", layout=layout)
        frame.sample_rate, frame.pts = form.rate, 0
        for packet in [*track.encode(frame), *track.encode(None)]:
            out.mux(packet)
    return stream.getvalue()


def some_samples(form: Form) -> np.ndarray:
    channels = [speech_like(3 * form.rate + 77, form.rate, seed) for seed in range(form.channels)]
    return channels[0] if form.channels == 1 else np.stack(channels, axis=1)


# Odd and bad files, of two seconds unless they say otherwise


def recording(format: str = "WAV", subtype: str = "PCM_16", *, rate: int = 16000, **options: Any) -> bytes:
    """Return a good file in a format of libsndfile."""
    return container(voice(2.0, rate), rate, format, subtype, **options)


def chunk(name: bytes, data: bytes, size: int | None = None) -> bytes:
    """Return a RIFF chunk, padded to an even length; ``size`` replaces the true size in its header."""
    return name + struct.pack("<I", len(data) if size is None else size) + data + bytes(len(data) % 2)


def wav(data: bytes | None = None, *, kind: int = 1, channels: int = 1, rate: int = 16000, bits: int = 16,
        block: int | None = None, data_size: int | None = None, before: bytes = b"",
        after: bytes = b"") -> bytes:  # fmt: skip
    """Return a WAV file with the given header values, and with further chunks before and after the samples."""
    data = pcm() if data is None else data
    block = channels * bits // 8 if block is None else block
    header = struct.pack("<HHIIHH", kind, channels, rate, rate * block & 0xFFFFFFFF, block & 0xFFFF, bits)
    chunks = chunk(b"fmt ", header) + before + chunk(b"data", data, data_size) + after
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def pcm(seconds: float = 2.0) -> bytes:
    """Samples of 16 bits, little end first."""
    return (voice(seconds) * 32767).astype("<i2").tobytes()


def floats(*, bad: float | None = None, gain: float = 1.0) -> bytes:
    """A WAV of 32-bit floats, one of them ``bad``."""
    samples = (voice(2.0) * gain).astype("<f4")
    if bad is not None:
        samples[20000] = bad
    return wav(samples.tobytes(), kind=3, bits=32)


def several_channels(number: int, format: str = "WAV", subtype: str = "PCM_16") -> bytes:
    return container(np.repeat(voice(2.0)[:, None], number, axis=1), 16000, format, subtype)


def flac_claiming(num_samples: int) -> bytes:
    """A FLAC whose STREAMINFO has another number of samples."""
    data = bytearray(recording("FLAC"))
    data[21] = data[21] & 0xF0 | num_samples >> 32
    data[22:26] = struct.pack(">I", num_samples & 0xFFFFFFFF)
    return bytes(data)
