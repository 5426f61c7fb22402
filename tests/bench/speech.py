"""Seeded audio of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf
from support.manifests import speaker_tag

RATE = 16000


def clip(rng: np.random.Generator, seconds: float, rate: int = RATE) -> np.ndarray:
    """Noise with the loudness and the spectrum of speech, so that FLAC takes as long as on speech: (samples,)."""
    noise = np.convolve(rng.normal(size=round(seconds * rate)), np.hanning(24) / 12, "same")
    syllables = np.abs(np.sin(np.arange(len(noise)) * 2 * np.pi * 3 / rate))
    return (0.1 * noise * syllables).astype(np.float32)


def write_corpus(
    folder: Path, count: int, *, rate: int = RATE, suffix: str = "flac", speakers: int = 8
) -> list[dict[str, Any]]:
    """Write ``count`` recordings of 2 to 10 s below ``folder/audio``, and their manifest; returns its records."""
    rng = np.random.default_rng(1)
    records = []
    (folder / "audio").mkdir(parents=True)
    for number, seconds in enumerate(rng.uniform(2, 10, count)):
        samples, name = clip(rng, seconds, rate), f"{number:05d}.{suffix}"
        sf.write(folder / "audio" / name, samples, rate, subtype="PCM_16")
        speaker = speaker_tag(f"speaker{number % speakers}")
        text = "go do you hear the words of number " + str(number)
        records.append({"audio_filepath": name, "duration": len(samples) / rate, "speaker": speaker, "text": text})
    (folder / "manifest.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records
