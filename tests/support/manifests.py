"""Manifest records, tones, manifests, configurations over them, and runs of ``prepare`` in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf

from sharmill.config import Config, to_config
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.run import run_stage
from sharmill.executors.local import LocalExecutor
from sharmill.manifest import Utterance
from sharmill.prepare.stage import PrepareStage, prepared_manifest


class KeepErrors(Listener):
    """A listener that keeps the errors of units."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def stage_ended(self, stage, result):
        self.errors += [error.message for error in result.failures.values()]


def speaker_tag(speaker: str, language: str = "en") -> str:
    """Return the speaker tag of a speaker, as manifests have it."""
    return f"| Language:{language} Dataset:Tests Speaker:{speaker} |"


def make_record(**changes: Any) -> dict[str, Any]:
    """Return a good record of ``a.wav`` of the audio root; a change to ``...`` removes the key."""
    record = {"audio_filepath": "a.wav", "duration": 2.0, "speaker": speaker_tag("anna"), "text": "Good day."} | changes
    return {key: value for key, value in record.items() if value is not ...}


def write_tone(path: Path, seconds: float = 2.0, *, rate: int = 16000, channels: int = 1) -> Path:
    """Write a quiet tone in the format of the suffix, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tone = 0.1 * np.sin(2 * np.pi * 220 * np.arange(round(seconds * rate)) / rate)
    sf.write(path, np.repeat(tone[:, None], channels, axis=1), rate)
    return path


def write_manifest(path: Path, records: list[Any]) -> Path:
    """Write records as JSON lines, ``bytes`` as the lines that they are, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@dataclass(frozen=True)
class Prepared:
    """The results of a run of ``prepare``."""

    config: Config
    stage: PrepareStage
    result: StageResult

    @property
    def kept(self) -> list[Utterance]:
        return [Utterance.from_json(line) for line in prepared_manifest(self.config).read_bytes().splitlines()]

    @property
    def rejects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stage.dir.rejects.read_bytes().splitlines()]

    @property
    def stats(self) -> dict[str, Any]:
        return json.loads(self.stage.run_dir.stats.read_bytes())


def config_for(folder: Path, sources: list[tuple[Path | str, Path | str] | dict[str, Any]], **changes: Any) -> Config:
    """Return a configuration with its directories below ``folder``, of (manifest, audio root) pairs or sources."""
    values = {
        "name": "small",
        "run_dir": str(folder / "run"),
        "dataset_dir": str(folder / "dataset"),
        "sources": [
            entry if isinstance(entry, dict) else {"manifest": str(entry[0]), "audio_root": str(entry[1])}
            for entry in sources
        ],
    }
    return to_config(values | changes, "test")


def run_prepare(config: Config) -> Prepared:
    """Run the stage to its end, in this process."""
    stage = PrepareStage(config)
    return Prepared(config, stage, run_stage(stage, LocalExecutor(1), KeepErrors(), max_reject_fraction=1.0))
