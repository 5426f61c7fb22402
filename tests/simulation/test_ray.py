"""Schedules on a simulated Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from support.properties import examples

from simulation.command import simulate_apart

simulate = partial(simulate_apart, str(Path(__file__).parent / "ray_schedules.py"))


def test_every_schedule_comes_to_its_end():
    ended = simulate("--seed", "1", "--schedules", str(examples(120)))
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


def test_a_seed_is_replayed_to_the_letter():
    ended = simulate("--seed", "36", "--schedules", "5", "--twice")
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
