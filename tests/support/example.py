"""A small dataset with codes, the training example on it in real processes, and ranks forked from a server."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support.project import REPOSITORY, Project, voice

NUM_CUTS = 60


def make_speech(folder: Path) -> Path:
    """A dataset of 60 cuts in 6 shards with codes of a toy codec."""
    project = Project(folder)
    draws = np.random.default_rng(7)
    for number in range(NUM_CUTS):
        samples = voice(draws.uniform(0.3, 0.9), pitch=draws.uniform(100, 300), seed=number)
        project.add(f"{number:02}.wav", samples, text=f"number {number}", speaker=f"s{number % 2}")
    project.encode(project.write(write={"shard_size": 10, "order": "manifest"}, match={"min_duration": 0.0}))
    return project.dataset


@dataclass(frozen=True)
class Example:
    """The training example with a small model, and its log."""

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
        """Return the output of the example, which must exit with status 0."""
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

    def ids_by_step(self, rank: int) -> dict[int, list[str]]:
        """Return the training ids of each step; a repeated step must have the same ids."""
        ids: dict[int, list[str]] = {}
        for values in self.steps(rank):
            assert ids.setdefault(values["step"], values["ids"]) == values["ids"]
        return ids

    def saved_step(self) -> int:
        """Return the step of the newest checkpoint, or 0 without one."""
        folder = self.out_dir / "checkpoints"
        steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
        return max(steps, default=0)

    def weights(self, step: int) -> dict[str, Any]:
        """The whole weights of a checkpoint, whatever layout wrote it."""
        import torch
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        whole = self.out_dir / "whole.pt"
        dcp_to_torch_save(self.out_dir / "checkpoints" / f"step-{step:09d}", whole)
        weights: dict[str, Any] = torch.load(whole, weights_only=True)["model"]
        return weights


def make_example(folder: Path, name: str, dataset: Path, **changes: Any) -> Example:
    """The example with a folder of its own; changes are keys of its configuration."""
    out_dir = folder / name
    values = {
        "dataset": str(dataset),
        "out_dir": str(out_dir),
        "max_steps": 40,
        "checkpoint_every": 5,
        "batch_seconds": 3.0,
        "seed": 1,
        "log_ids": True,
        "warmup_steps": 5,
        "model": {"dim": 16, "num_layers": 1, "num_heads": 2},
    }
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(values | changes))  # JSON is YAML
    return Example(config, out_dir)


_PRELOADED = [
    "nemo.collections.asr", "nemo.collections.tts", "nemo.collections.common.data.lhotse.dataloader",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
]  # fmt: skip
LIMIT_SECONDS = 500


def run_ranks(target: Callable[..., None], world_size: int, *arguments: Any) -> None:
    """Run ``target(*arguments)`` in ranks with the environment that torchrun gives them; all must end well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        context.Process(target=_run_rank, args=(rank, world_size, port, target, arguments))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(timeout=LIMIT_SECONDS)
        assert [rank.exitcode for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()


def _run_rank(rank: int, world_size: int, port: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    import torch

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    # As under torchrun: NeMo's parsers make functions that cannot be pickled.
    multiprocessing.set_start_method("fork", force=True)
    target(*arguments)
