"""Utterances, manifest records and audio files of the demo corpus, for ``corpus`` and ``defects`` to make.

Files are written byte for byte the same for the same samples, which the float format of WAV is not by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import soundfile
from numpy.typing import NDArray

from sharmill.demo.voices import Speaker

Record = dict[str, Any]
Samples = NDArray[np.int16] | NDArray[np.float32]

_PEAK_CHUNK: Final = b"PEAK"


@dataclass(frozen=True)
class SpokenText:
    """Samples of shape (time,) that a speaker said, not yet on disk."""

    audio_root: Path
    speaker: Speaker
    text: str
    samples: NDArray[np.int16]

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return len(self.samples) / self.speaker.sampling_rate

    def record(self, path: str, *, duration: float | None = None) -> Record:
        """Return a manifest record; ``path`` is relative to the audio root, ``duration`` by default its own."""
        return {
            "audio_filepath": path,
            "duration": round(self.duration if duration is None else duration, 6),
            "text": self.text,
            "speaker": f"| Language:en Dataset:Demo Speaker:{self.speaker.name} |",
        }

    def write_as(self, name: str, samples: Samples | None = None, *, suffix: str = ".flac") -> Record:
        """Write the samples (its own if none are given) into the speaker's folder; return their record."""
        samples = self.samples if samples is None else samples
        path = f"{self.speaker.name}/{self.speaker.name}_{name}{suffix}"
        write_audio(self.audio_root / path, samples, self.speaker.sampling_rate)
        return self.record(path, duration=len(samples) / self.speaker.sampling_rate)


def write_audio(path: Path, samples: Samples, sampling_rate: int) -> None:
    """Write samples, shape (time,) or (time, channels), in the format that the suffix of ``path`` names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subtype = "FLOAT" if samples.dtype == np.float32 else "PCM_16"
    soundfile.write(path, samples, sampling_rate, subtype=subtype)
    if subtype == "FLOAT":
        _clear_peak_time(path)


def _clear_peak_time(path: Path) -> None:
    """Set the time of writing to zero that libsndfile puts into the PEAK chunk of a float WAV."""
    content = bytearray(path.read_bytes())
    chunk = content.find(_PEAK_CHUNK)
    if chunk >= 0:
        # Chunk: name, size, version, time, each of four bytes.
        content[chunk + 12 : chunk + 16] = bytes(4)
        path.write_bytes(content)
