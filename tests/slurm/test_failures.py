"""Units that fail on a cluster, ranks that cannot work, and submissions that must not be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from support.errors import raises
from support.toy_cluster import SETUP, make_profile, slurm
from support.toy_stage import wait_until

from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.run_notes import read_end
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm import queue as slurm_queue
from sharmill.executors.slurm.queue import queued_jobs, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def done_units(run) -> list[int]:
    return sorted(read_ledger(run.stage.dir, load_plan(run.stage)))


def test_a_second_submission_adds_ranks_and_one_that_begins_anew_is_refused(make_run):
    run = make_run(units=8, everywhere="wait:go", profile=make_profile(max_ranks=2))
    run.start()
    jobs = queued_jobs(run.run_dir)
    added = replace(run).start()
    assert "8 units on 2 more ranks" in added.message
    roles = Counter(job.role for job in queued_jobs(run.run_dir))
    assert roles == Counter(job.role for job in jobs) + Counter(rank=2)
    with raises(ConfigError, "jobs_in_queue"):
        replace(run, restart=True).start()
    assert read_end(run.run_dir) is None
    run.stage.mark("go")
    assert wait_for_end(run.run_dir).state == "done"


def test_when_all_jobs_are_cancelled_waiting_ends_and_a_new_submission_goes_on(make_run):
    run = make_run(units=8, everywhere="wait:go", profile=make_profile(max_ranks=2))
    run.start()
    slurm("scancel", *(job.id for job in queued_jobs(run.run_dir)))
    with raises(FatalError, "jobs_gone"):
        wait_for_end(run.run_dir)
    run.stage.mark("go")
    wait_until(lambda: not queued_jobs(run.run_dir))
    run.start()
    assert wait_for_end(run.run_dir).state == "done"


def test_what_slurm_refuses_leaves_no_job_behind(make_run):
    """The ranks are accepted, the advance job behind them is not."""
    profile = make_profile()
    profile = replace(profile, cpu=replace(profile.cpu, partition="nowhere"))
    run = make_run(units=8, uses_gpu=True, profile=profile)
    with raises(FatalError, "jobs_refused", "invalid partition"):
        run.start()
    assert read_end(run.run_dir).state == "failed"
    wait_until(lambda: queued_jobs(run.run_dir) == [])


def test_arrays_above_the_clusters_limit_are_split(make_run, monkeypatch):
    monkeypatch.setattr(slurm_queue, "max_array_size", lambda patience: 3)
    run = make_run(units=8, everywhere="wait:go", profile=make_profile(max_ranks=8, max_parallel=4))
    state = run.start()
    arrays = sorted({job.split("_")[0] for job in state.jobs[:-1]}, key=int)
    assert [sum(job.startswith(f"{array}_") for job in state.jobs) for array in arrays] == [3, 3, 2]
    assert [len(ranks) for ranks, _ in run.jobs.arrays(run.stage, 8)] == [3, 3, 2]
    shown = slurm("squeue", "--noheader", "--format=%i", f"--jobs={','.join(arrays)}")
    limits = [slurm("scontrol", "show", "job", f"{array}") for array in arrays]
    assert ["ArrayTaskThrottle=1" in limit for limit in limits] == [True, True, True], shown
    run.stage.mark("go")
    assert wait_for_end(run.run_dir).state == "done"
    assert done_units(run) == list(range(8))


def test_a_stage_with_too_many_rejects_stops_before_its_end(make_run):
    options = {"units": 400, "seconds": 0.5, "everywhere": "reject:too_short,too_short"}
    run = make_run(**options, profile=make_profile(max_ranks=2))
    run = replace(run, dataset=replace(run.dataset, max_reject_fraction=0.001))
    run.start()
    state = wait_for_end(run.run_dir)
    assert state.state == "failed"
    assert "max_reject_fraction=0.001" in state.message
    assert len(done_units(run)) <= 4


SUBMIT = """
import sys
from pathlib import Path
import cloudpickle, os, signal
from sharmill.executors.slurm.executor import JobRequests
run = cloudpickle.loads(Path(sys.argv[1]).read_bytes())
def die(self, *arguments):
    os.kill(os.getpid(), signal.SIGKILL)
JobRequests.submit_behind = die
run.start()
"""


def test_a_submission_killed_between_ranks_and_advance_job_goes_on_when_started_again(make_run, tmp_path):
    import cloudpickle

    run = make_run(units=8, seconds=0.3, profile=make_profile(max_ranks=2))
    pickled = tmp_path / "run.pkl"
    pickled.write_bytes(cloudpickle.dumps(run))
    environment = dict(line.removeprefix("export ").split("=", 1) for line in SETUP)
    killed = subprocess.run([sys.executable, "-c", SUBMIT, pickled], env=os.environ | environment, check=False)
    assert killed.returncode == -9
    assert read_end(run.run_dir) is None
    assert "still in the queue, then advance job" in run.start().message
    assert wait_for_end(run.run_dir).state == "done"
    assert done_units(run) == list(range(8))
    assert run.stage.redone() == 0
