"""The lines about a training's progress."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from speech_lm import Losses  # noqa: E402  it needs torch
from train import ProgressLines, Training  # noqa: E402
from train_config import TrainConfig  # noqa: E402
from train_world import World  # noqa: E402


def test_lines_come_at_intervals_with_means_and_the_time_left(capsys):
    now = [0.0]
    lines = ProgressLines(max_steps=2000, seconds=10.0, clock=lambda: now[0])
    for step in range(1, 24):
        now[0] += 1.0
        lines.add(step, loss=float(step), num_tokens=500)
    assert capsys.readouterr().out.splitlines() == [
        "train: step 1 of 2,000, loss 1.0000",
        "train: step 11 of 2,000, loss 6.5000, 500 tokens per second on each rank, 0:33:09 left",
        "train: step 21 of 2,000, loss 16.5000, 500 tokens per second on each rank, 0:32:59 left",
    ]


def test_the_last_step_has_a_line(capsys):
    now = [0.0]
    lines = ProgressLines(max_steps=3, seconds=10.0, clock=lambda: now[0])
    for step in (1, 2, 3):
        now[0] += 0.5
        lines.add(step, loss=2.0, num_tokens=100)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "train: step 3 of 3, loss 2.0000, 200 tokens per second on each rank, 0:00:00 left"


def test_the_clock_is_read_when_the_gpu_has_done_its_step(tmp_path, monkeypatch):
    """The calls take 0.5 s, and what they have begun on the GPU 4 s."""
    now = [0.0]

    def wait_for_gpu(device):
        now[0] += 4.0

    monkeypatch.setattr("train.time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic))
    monkeypatch.setattr(torch.cuda, "synchronize", wait_for_gpu)

    class AloneOnGpu(World):
        def any(self, *values):
            return list(values)

    class QueuedTraining(Training):
        def __init__(self):
            self.config = TrainConfig(dataset="none", out_dir=str(tmp_path), max_steps=1)
            self.world = AloneOnGpu(0, 1, torch.device("cuda", 0), mesh=None)
            self.out_dir, self.step, self.seed, self.leave = tmp_path, 0, 1, False
            self.batches_of_rank, self.saved_at, self.curves = 1, 0.0, None

        def _train(self, batch):
            now[0] += 0.5
            return Losses(torch.tensor(1.0), torch.tensor(1.0), 900)

        def _save(self):
            pass

    QueuedTraining()._run_steps(iter([{"ids": ["a"]}]))
    step = json.loads((tmp_path / "steps.rank0.jsonl").read_text().splitlines()[-1])
    assert step["tokens_per_second"] == 200.0
