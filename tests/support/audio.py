"""Audio made up for the tests: samples, files in memory, and the reason of a reject."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf

from sharmill.audio.files import open_recording
from sharmill.errors import RejectRecord

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


def container(samples: np.ndarray, rate: int, format: str, subtype: str, **options) -> bytes:
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
    return caught.value.reason


def one_torch_thread(function, *arguments):
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(before)


def read(path, start=0, num_samples=None, channel=None) -> tuple[np.ndarray, int]:
    """The samples of a file, or of a part of it, and its sampling rate."""
    with open_recording(path) as recording:
        return recording.read(start, num_samples, channel), recording.info.sampling_rate
