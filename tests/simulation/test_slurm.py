"""Schedules on a simulated SLURM."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.properties import examples

from simulation.command import simulate_apart

simulate = partial(simulate_apart, str(Path(__file__).parent / "slurm.py"))


def test_schedules_end_with_the_output_of_an_undisturbed_run_and_are_replayed_to_the_letter():
    ended = simulate("--seed", "1000", "--schedules", str(examples(70)), "--twice")
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


@pytest.mark.slow
def test_more_schedules():
    ended = simulate("--seed", "5000", "--schedules", "230")
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
