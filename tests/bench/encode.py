"""Rows of the stage encode, beside the same codec over targets and contexts one by one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import soundfile as sf
import torch
from support.shar import Project

from bench.rows import Case, row
from bench.speech import write_corpus
from sharmill.models import load_codec


class _Counted:
    """A codec that counts the items that go through it."""

    def __init__(self, codec: Any) -> None:
        self._codec = codec
        self.num_items = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def encode(self, audio: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        self.num_items += len(num_samples)
        return self._codec.encode(audio, num_samples)


@row("encode built-in codec, shuffled", baseline="one by one", target="≥ 2; passes ≤ 1.02")
def shuffled(folder: Path, tiny: bool) -> Case:
    """Each utterance is a target once and the context of another; the further figure counts passes per segment."""
    project = Project(folder)
    project.records = write_corpus(folder, 6 if tiny else 48)
    number = len(project.records)
    config = project.write(
        [(index + number // 2) % number for index in range(number)],
        write={"shard_size": number // 3}, match={"min_duration": 0.0},
        encode={"codecs": [{"name": "toy", "model": "builtin"}]},
    )  # fmt: skip
    made = (project.dataset, project.run_dir)
    for path in made:
        shutil.copytree(path, path.with_suffix(".written"))
    codec = load_codec("builtin")

    def before() -> None:
        for path in made:
            shutil.rmtree(path)
            shutil.copytree(path.with_suffix(".written"), path)

    def ours() -> dict[str, float]:
        counted = _Counted(codec)
        project.encode(config, codec=counted)
        return {"passes per segment": counted.num_items / number}

    def theirs() -> None:
        for record in [*project.records, *project.records]:
            samples = torch.from_numpy(sf.read(project.root / record["audio_filepath"], dtype="float32")[0])
            codec.encode(samples[None], torch.tensor([len(samples)]))

    seconds = sum(record["duration"] for record in project.records)
    return Case(amount=seconds / 3600, unit="hours of segments", ours=ours, baseline=theirs, before=before)
