"""What goes wrong on a cluster, for real: every time the same bytes, and only what was in flight is done again."""

from __future__ import annotations

import os
import re
import shutil
import signal
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

from sharmill.engine.progress import read_progress
from sharmill.executors.slurm.chain_state import wait_for_end
from sharmill.executors.slurm.profile import StageProfile, StageProfiles
from sharmill.executors.slurm.queue import queued_jobs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def report(chain, record_property) -> int:
    """How many attempts there were beyond one a unit; shown in the JUnit file, and with ``-s``."""
    redone = chain.stage.redone()
    record_property("units redone", redone)
    print(f"\n{redone} of {chain.stage.units} units redone")
    return redone


def test_an_undisturbed_chain(make_chain, tmp_path, record_property):
    chain = make_chain(units=40)
    assert chain.start().state == "waiting"
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    assert report(chain, record_property) == 0


def kill_rank(chain):
    os.kill(read_progress(chain.stage.dir.progress)[0].pid, signal.SIGKILL)


def cancel_rank(chain):
    slurm("scancel", running_ranks(chain)[0])


def cancel_driver_job(chain):
    slurm("scancel", *(job.id for job in queued_jobs(chain.run_dir) if job.role == "driver"))


@pytest.mark.parametrize(("end", "units_lost"), [(kill_rank, 1), (cancel_rank, 1), (cancel_driver_job, 0)])
def test_the_end_of_a_job_costs_at_most_its_unit(make_chain, tmp_path, record_property, end, units_lost):
    """The unit is done again by another rank, unless the end hit the moment between two units."""
    chain = make_chain(units=40, seconds=0.7)
    chain.start()
    wait_for_units(chain, 4)
    end(chain)
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    assert report(chain, record_property) <= units_lost


def test_preempted_ranks_are_requeued_and_go_on(make_chain, tmp_path, record_property):
    """As with configs/clusters/preemptible.yaml, the driver job is where nothing is preempted."""
    stages = StageProfiles(driver=StageProfile(partition="cpu"))
    chain = make_chain(units=120, seconds=3.0, profile=make_profile(partition="scavenge", stages=stages))
    driver_job = chain.start().jobs[-1]
    wait_for_units(chain, 4)
    ranks = running_ranks(chain)
    shown = slurm("squeue", "--noheader", "--format=%P", f"--jobs={driver_job},{ranks[0]}")
    assert sorted(shown.split()) == ["cpu", "scavenge"]
    intruder = slurm(
        "sbatch", "--parsable", "--partition=cpu", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"
    ).strip()
    for rank in ranks:
        wait_until(lambda rank=rank: restarts(rank))
    slurm("scancel", intruder)
    chain.stage.mark("hurry")
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    assert report(chain, record_property) <= len(ranks)


def test_ranks_in_an_image_of_apptainer(make_chain, tmp_path):
    """By a stand-in, which runs what follows the image."""
    apptainer = tmp_path / "bin/apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/calls\nexec "${{@:4}}"\n')
    apptainer.chmod(0o755)
    setup = [*SETUP, f"export PATH={apptainer.parent}:$PATH"]
    python = f"apptainer exec --nv image.sif {sys.executable}"
    chain = make_chain(units=4, profile=make_profile(max_ranks=2, python=python, setup=setup, driver_units=4))
    chain.start()
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.startswith(f"exec --nv image.sif {sys.executable} -u -m submitit") for call in calls] == [True, True]


def test_work_for_longer_than_the_time_limit(make_chain, tmp_path, record_property):
    """Three minutes of work for four ranks; a limit of one minute, at which a rank leaves 30 s before."""
    chain = make_chain(units=72, seconds=2.5, profile=make_profile(timeout_min=1))
    ranks = [job for job in chain.start().jobs if "_" in job]
    wait_until(lambda: all(restarts(rank) for rank in ranks))
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    assert report(chain, record_property) <= sum(map(restarts, ranks))


@pytest.mark.skipif(
    not KILL_NODE.exists() or os.getuid() != 0, reason="needs kill_node.sh of the test cluster, as root"
)
def test_a_node_crash_costs_the_units_of_its_ranks(make_chain, tmp_path, record_property, nodes_come_back):
    chain = make_chain(units=60, seconds=1.0)
    chain.start()
    wait_for_units(chain, 8)
    node = slurm("squeue", "--noheader", "--format=%N", f"--jobs={running_ranks(chain)[0]}").strip()
    lost = slurm("squeue", "--noheader", "--array", f"--nodelist={node}", "--format=%i").split()
    subprocess.run(["bash", KILL_NODE, node], check=True)
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    assert report(chain, record_property) <= len(lost)


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
