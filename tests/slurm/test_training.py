"""Consecutive training jobs on a real SLURM, one of which is killed: the next one continues with the same data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.example import make_example, make_speech
from support.project import REPOSITORY
from support.toy_cluster import slurm
from support.toy_stage import wait_until

pytestmark = pytest.mark.slurm

PROFILE = "signal_s: 30\ngpu: {partition: gpu, gpus: 1, cores: 2, memory_gb: 4, timeout_min: 10, device: cpu}\n"


def test_training_continues_after_a_killed_and_a_stopped_job(tmp_path: Path) -> None:
    example = make_example(tmp_path, "jobs", make_speech(tmp_path / "speech"), max_steps=70)
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
    wait_until(lambda: len(example.steps(0)) >= 12, 240.0)
    slurm("scancel", "--signal=KILL", first)
    wait_until(lambda: len(example.steps(0)) >= 40, 240.0)
    # SLURM sends this signal before a time limit, too.
    slurm("scancel", "--batch", "--signal=TERM", second)
    wait_until(lambda: not slurm("squeue", "--noheader", f"--jobs={first},{second},{third}"), 240.0)
    assert 0 < example.saved_step() == 70, Path(str(log).replace("%j", second)).read_text()
    assert "train: told to leave at step" in Path(str(log).replace("%j", second)).read_text()
    assert "train: finished at step 70" in Path(str(log).replace("%j", third)).read_text()
    whole = make_example(tmp_path, "whole", Path(tmp_path / "speech/dataset"), max_steps=70)
    whole.run()
    for rank in range(2):
        assert example.ids_by_step(rank) == whole.ids_by_step(rank)
