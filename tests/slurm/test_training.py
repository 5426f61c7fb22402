"""Consecutive training jobs on a real SLURM, one of which is killed: the next one goes on with the same data."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.example import make_example, make_speech
from support.paths import REPOSITORY

pytestmark = pytest.mark.slurm

PROFILE = "signal_s: 30\ngpu: {partition: gpu, gpus: 1, cores: 2, memory_gb: 4, timeout_min: 10, device: cpu}\n"


def wait_for(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)


def queue(*options: str) -> str:
    return subprocess.run(["squeue", "-h", *options], capture_output=True, text=True, check=True).stdout


def test_one_job_is_killed_another_told_to_leave_and_the_last_one_goes_on(tmp_path: Path) -> None:
    example = make_example(tmp_path, "jobs", make_speech(tmp_path / "speech"), max_steps=150)
    profile = tmp_path / "profile.yaml"
    profile.write_text(PROFILE)
    log = tmp_path / "train-%j.log"
    launch = [sys.executable, str(REPOSITORY / "jobs/launch_training.py"), "-n", "3", "--profile", str(profile)]
    options = [f"--sbatch=--output={log}", f"--sbatch=--chdir={REPOSITORY}", str(example.config)]
    environment = os.environ | {
        "RANKS": "2",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    launched = subprocess.run(
        [*launch, *options], env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert launched.returncode == 0, launched.stderr
    first, second, third = (line.split()[1].rstrip(",") for line in launched.stdout.splitlines())
    wait_for(lambda: len(example.steps(0)) >= 12)
    subprocess.run(["scancel", "--signal=KILL", first], check=True)
    wait_for(lambda: len(example.steps(0)) >= 40)
    # As before a time limit.
    subprocess.run(["scancel", "--batch", "--signal=TERM", second], check=True)
    wait_for(lambda: not queue(f"--jobs={first},{second},{third}"))
    assert 0 < example.saved_step() == 150, Path(str(log).replace("%j", second)).read_text()
    assert "train: told to leave at step" in Path(str(log).replace("%j", second)).read_text()
    assert "train: finished at step 150" in Path(str(log).replace("%j", third)).read_text()
    whole = make_example(tmp_path, "whole", Path(tmp_path / "speech/dataset"), max_steps=150)
    whole.run()
    for rank in range(2):
        assert example.ids_by_step(rank) == whole.ids_by_step(rank)
