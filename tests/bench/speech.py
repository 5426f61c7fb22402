"""Seeded audio for the benchmarks, and figures from a stage's ledger."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import librosa
import numpy as np
import soundfile as sf
import torch
from support.project import speaker_tag

from sharmill.models.batches import pad, padded_batches

RATE = 16000


def clip(rng: np.random.Generator, seconds: float, rate: int = RATE) -> np.ndarray:
    """Return noise (samples,) with the loudness and spectrum of speech, for which FLAC takes as long as for speech."""
    noise = np.convolve(rng.normal(size=round(seconds * rate)), np.hanning(24) / 12, "same")
    syllables = np.abs(np.sin(np.arange(len(noise)) * 2 * np.pi * 3 / rate))
    return (0.1 * noise * syllables).astype(np.float32)


def write_corpus(
    folder: Path, count: int, *, rate: int = RATE, suffix: str = "flac", speakers: int = 8, channels: int = 1
) -> list[dict[str, Any]]:
    """Write ``count`` recordings of 2 to 10 s below ``folder/audio`` and their manifest, and return its records."""
    rng = np.random.default_rng(1)
    records = []
    (folder / "audio").mkdir(parents=True)
    minute = clip(rng, 60.0, rate)
    for number, seconds in enumerate(rng.uniform(2, 10, count)):
        start, name = rng.integers(50 * rate), f"{number:05d}.{suffix}"
        samples = minute[start : start + round(seconds * rate)]
        subtype = None if suffix == "mp3" else "PCM_16"
        sf.write(folder / "audio" / name, np.stack([samples] * channels, axis=1), rate, subtype=subtype)
        speaker = speaker_tag(f"speaker{number % speakers}")
        text = "go do you hear the words of number " + str(number)
        records.append({"audio_filepath": name, "duration": len(samples) / rate, "speaker": speaker, "text": text})
    (folder / "manifest.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def model_seconds(run_dir: Path, stage: str, done: str) -> tuple[float, float]:
    """Return the seconds of audio, without and with padding, that a model processed according to its stage's ledger."""
    commits = [json.loads(line) for path in run_dir.glob(f"{stage}/**/ledger/*.jsonl") for line in path.open()]
    bare, padded = (sum(commit["stats"][f"{kind}_seconds"] for commit in commits) for kind in (done, "padded"))
    return bare, padded


def load(path: Path, rate: int) -> np.ndarray:
    """Decode and resample a file to (samples,) as a plain script does."""
    return librosa.load(path, sr=rate)[0]


def in_batches(
    model: Callable[..., Any], audio: Sequence[np.ndarray], num_samples: int, *, pinned: bool = False
) -> Callable[[], None]:
    """Return a function that runs a model alone, on prepared batches of so many padded samples."""
    batches = padded_batches([len(samples) for samples in audio], num_samples)
    padded = [pad([audio[index] for index in batch], pinned=pinned) for batch in batches]

    @torch.no_grad()
    def alone() -> None:
        for batch in padded:
            model(*batch)

    return alone
