"""Schedules on a simulated SLURM; ``make torture`` has more of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.properties import examples

SCRIPT = Path(__file__).parent / "slurm.py"


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, since Python keeps the hook that tells of file operations."""
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_schedules_end_with_the_output_of_an_undisturbed_run_and_are_replayed_to_the_letter():
    ended = simulate("--seed", "1000", "--schedules", str(examples(100)), "--twice")
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


@pytest.mark.slow
def test_more_schedules():
    ended = simulate("--seed", "5000", "--schedules", "300")
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


@pytest.mark.slow
def test_defects_that_clusters_have_shown_are_found_where_they_are_put_back_and_only_there():
    ended = simulate("--defects")
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    assert ended.stdout.count("seed ") >= 16
