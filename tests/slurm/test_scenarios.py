"""What goes wrong on a cluster, for real: every time the same bytes, and only what was in flight is done again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from support.toy_cluster import (
    KILL_NODE,
    SETUP,
    assert_same_as_local,
    make_profile,
    running_ranks,
    slurm,
    wait_for_units,
)
from support.toy_stage import wait_until

from sharmill.executors.slurm.profile import StageProfile, StageProfiles
from sharmill.executors.slurm.queue import queued_jobs, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def report(run, record_property) -> int:
    """How many attempts there were beyond one a unit; shown in the JUnit file, and with ``-s``."""
    redone = run.stage.redone()
    record_property("units redone", redone)
    print(f"\n{redone} of {run.stage.units} units redone")
    return redone


def cancel_rank(run):
    slurm("scancel", running_ranks(run)[0])


def cancel_advance_job(run):
    slurm("scancel", *(job.id for job in queued_jobs(run.run_dir) if job.role == "advance"))


@pytest.mark.parametrize(("end", "units_lost"), [(cancel_rank, 1), (cancel_advance_job, 0)])
def test_the_end_of_a_job_costs_at_most_its_unit(make_run, tmp_path, record_property, end, units_lost):
    """The unit is done again by another rank, unless the end hit the moment between two units."""
    run = make_run(units=40, seconds=0.7)
    run.start()
    wait_for_units(run, 4)
    end(run)
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, tmp_path)
    assert report(run, record_property) <= units_lost


def test_preempted_ranks_are_requeued_and_go_on(make_run, tmp_path, record_property):
    """As with configs/clusters/preemptible.yaml, the advance job is where nothing is preempted."""
    stages = StageProfiles(driver=StageProfile(partition="cpu"))
    run = make_run(units=120, seconds=3.0, profile=make_profile(partition="scavenge", stages=stages))
    advance_job = run.start().jobs[-1]
    wait_for_units(run, 4)
    ranks = running_ranks(run)
    shown = slurm("squeue", "--noheader", "--format=%P", f"--jobs={advance_job},{ranks[0]}")
    assert sorted(shown.split()) == ["cpu", "scavenge"]
    intruder = slurm(
        "sbatch", "--parsable", "--partition=cpu", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"
    ).strip()
    for rank in ranks:
        wait_until(lambda rank=rank: restarts(rank))
    slurm("scancel", intruder)
    run.stage.mark("hurry")
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, tmp_path)
    assert report(run, record_property) <= len(ranks)


def test_ranks_in_an_image_of_apptainer(make_run, tmp_path):
    """By a stand-in, which runs what follows the image."""
    apptainer = tmp_path / "bin/apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/calls\nexec "${{@:4}}"\n')
    apptainer.chmod(0o755)
    setup = [*SETUP, f"export PATH={apptainer.parent}:$PATH"]
    python = f"apptainer exec --nv image.sif {sys.executable}"
    run = make_run(units=4, profile=make_profile(max_ranks=2, python=python, setup=setup, driver_units=4))
    run.start()
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, tmp_path)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.startswith(f"exec --nv image.sif {sys.executable} -u -m submitit") for call in calls] == [True, True]


def test_work_for_longer_than_the_time_limit(make_run, tmp_path, record_property):
    """Three minutes of work for four ranks; a limit of one minute, at which a rank leaves 30 s before."""
    run = make_run(units=72, seconds=2.5, profile=make_profile(timeout_min=1))
    ranks = [job for job in run.start().jobs if "_" in job]
    wait_until(lambda: all(restarts(rank) for rank in ranks))
    run.stage.mark("hurry")
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, tmp_path)
    assert report(run, record_property) <= sum(map(restarts, ranks))


@pytest.mark.skipif(
    not KILL_NODE.exists() or os.getuid() != 0, reason="needs kill_node.sh of the test cluster, as root"
)
def test_a_node_crash_costs_the_units_of_its_ranks(make_run, tmp_path, record_property, nodes_come_back):
    run = make_run(units=60, seconds=1.0)
    run.start()
    wait_for_units(run, 8)
    node = slurm("squeue", "--noheader", "--format=%N", f"--jobs={running_ranks(run)[0]}").strip()
    lost = slurm("squeue", "--noheader", "--array", f"--nodelist={node}", "--format=%i").split()
    subprocess.run(["bash", KILL_NODE, node], check=True)
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, tmp_path)
    assert report(run, record_property) <= len(lost)


@pytest.fixture
def nodes_come_back():
    yield
    for node in ("n1", "n2"):
        if not is_alive(f"/run/slurm-test/slurmd-{node}.pid"):
            slurm(shutil.which("slurmd") or "/usr/sbin/slurmd", "-N", node)
    shown = ("sinfo", "--noheader", "--Node", "--partition=cpu", "--format=%t")
    wait_until(lambda: not {"down", "down*", "idle*"} & set(slurm(*shown).split()))


def is_alive(pid_file: str) -> bool:
    return subprocess.run(["pgrep", "--pidfile", pid_file], capture_output=True, check=False).returncode == 0


def restarts(task: str) -> int:
    return int(re.search(r"Restarts=(\d+)", slurm("scontrol", "show", "job", task))[1])
