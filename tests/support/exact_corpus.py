"""A corpus whose bytes are the same on every machine: voices of integers, without espeak or float arithmetic."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import yaml

RATE = 22_050
VOICES = {"low": 211, "middle": 139, "high": 97}  # samples of a period
UTTERANCES = 5


def make_exact_corpus(folder: Path) -> Path:
    """Write three voices with five utterances of 3.2 to 4.8 s each and one bad record; return the manifest's path."""
    records = []
    for number, (voice, period) in enumerate(VOICES.items()):
        for utterance in range(UTTERANCES):
            name = f"{voice}/{utterance}.wav"
            num_samples = RATE * 32 // 10 + RATE * 4 // 10 * utterance
            _write(folder / "audio" / name, _voice(num_samples, period, seed=10 * number + utterance))
            tag = f"| Language:en Dataset:Exact Speaker:{voice} |"
            duration = num_samples / RATE
            records.append({"audio_filepath": name, "duration": duration, "text": f"text {utterance}", "speaker": tag})
    records.append({**records[0], "audio_filepath": "low/missing.wav"})
    manifest = folder / "manifest.json"
    manifest.write_text("".join(json.dumps(record) + "\n" for record in records))
    return manifest


def write_exact_config(folder: Path, manifest: Path, audio_root: Path, **changes: dict[str, Any] | None) -> Path:
    """Write ``folder/config.yaml`` with resemblyzer, the built-in codec and several units in each stage.

    ``changes`` are added to sections; None leaves a section out.
    """
    values: dict[str, Any] = {
        "name": "exact",
        "run_dir": str(folder / "run"),
        "dataset_dir": str(folder / "dataset"),
        "sources": [{"type": "nemo", "manifest": str(manifest), "audio_root": str(audio_root)}],
        "prepare": {"unit_records": 4},
        "match": {"encoder": "resemblyzer", "unit_seconds": 20.0},
        "write": {"shard_size": 4},
        "encode": {"codecs": [{"name": "builtin", "model": "builtin"}], "unit_seconds": 20.0},
        "executor": {"workers": 2},
    }
    for section, change in changes.items():
        values[section] = None if change is None else values[section] | change
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


def _voice(num_samples: int, period: int, seed: int) -> np.ndarray:
    """Return a saw tooth with noise, smoothed and swelling like syllables, as int16 (num_samples,)."""
    times = np.arange(num_samples, dtype=np.int64)
    # The pitch moves by some samples a period, from utterance to utterance in another way.
    wobble = np.abs(times // 40 % 60 - 30) // (6 + seed % 3)
    saw = (times % (period + wobble)) * 24_000 // period - 12_000
    noise = (times * times * 40_503 + (times + seed) * 30_011) % 4_001 - 2_000
    summed = np.cumsum(saw + noise)
    width = 3 + period // 40
    smooth = (summed[width:] - summed[:-width]) // width
    smooth = np.concatenate([smooth, smooth[-1:].repeat(width)])
    swell = np.abs((times + 700 * seed) * 1_000 // (RATE // 5) % 2_000 - 1_000)
    return np.clip(smooth * swell // 1_000, -32_768, 32_767).astype("<i2")


def _write(path: Path, samples: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as stream:
        stream.setnchannels(1)
        stream.setsampwidth(2)
        stream.setframerate(RATE)
        stream.writeframes(samples.tobytes())
