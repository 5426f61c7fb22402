"""A small dataset with codes, and the training example on it in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dummies_shar import Project, voice

REPOSITORY = Path(__file__).parents[2]
NUM_CUTS = 60


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 60 cuts in 6 shards with codes of a toy codec; not to be changed."""
    project = Project(tmp_path_factory.mktemp("speech"))
    draws = np.random.default_rng(7)
    for number in range(NUM_CUTS):
        samples = voice(draws.uniform(0.3, 0.9), pitch=draws.uniform(100, 300), seed=number)
        project.add(f"{number:02}.wav", samples, text=f"number {number}", speaker=f"s{number % 2}")
    config = project.write(write={"shard_size": 10, "order": "manifest"}, match={"min_duration": 0.0})
    project.encode(config)
    return project.dataset


@dataclass(frozen=True)
class Example:
    """The training example with a small model, and what it logged."""

    config: Path
    out_dir: Path

    def command(self, *overrides: str, ranks: int = 2) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return [*torchrun, str(REPOSITORY / "jobs/train.py"), str(self.config), *overrides]

    def start(self, *overrides: str, ranks: int = 2) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(*overrides, ranks=ranks), env=environment, text=True, stdout=pipe, stderr=subprocess.STDOUT
        )

    def run(self, *overrides: str, ranks: int = 2) -> str:
        """What it printed; it must end well."""
        process = self.start(*overrides, ranks=ranks)
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
        return printed

    def steps(self, rank: int) -> list[dict[str, Any]]:
        """The steps that a rank logged, whole lines only, in the order in which they ran."""
        path = self.out_dir / f"steps.rank{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        logged = [json.loads(line) for line in lines if line.endswith("\n")]
        return [values for values in logged if "step" in values]

    def saved_step(self) -> int:
        """The step of the newest checkpoint, 0 where there is none."""
        folder = self.out_dir / "checkpoints"
        steps = [int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.pt")]
        return max(steps, default=0)


@pytest.fixture
def example(speech: Path, tmp_path: Path) -> Callable[..., Example]:
    """``example(name, **changes)``: the example with its own folder; changes are keys of its configuration."""

    def make(name: str, **changes: Any) -> Example:
        out_dir = tmp_path / name
        values = {
            "dataset": str(speech),
            "out_dir": str(out_dir),
            "max_steps": 40,
            "checkpoint_every": 5,
            "batch_seconds": 3.0,
            "seed": 1,
            "log_ids": True,
            "warmup_steps": 5,
            "model": {"dim": 16, "num_layers": 1, "num_heads": 2},
        }
        config = tmp_path / f"{name}.yaml"
        config.write_text(json.dumps(values | changes))  # JSON is YAML
        return Example(config, out_dir)

    return make
