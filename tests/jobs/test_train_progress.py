"""The lines about a training's progress."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from train import ProgressLines  # noqa: E402


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
