"""Schedules on a simulated SLURM; ``make torture`` has more of them."""

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


@pytest.mark.slow
def test_defects_that_clusters_have_shown_are_found_where_they_are_put_back_and_only_there():
    ended = simulate("--defects")
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    assert ended.stdout.count("seed ") >= 25
