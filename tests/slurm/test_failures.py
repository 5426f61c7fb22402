"""Units that fail on a cluster, ranks that cannot work, and submissions that must not be."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from support.errors import raises
from support.toy_cluster import SETUP, make_profile, slurm
from support.toy_stage import wait_until

from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm import job_requests
from sharmill.executors.slurm.chain_state import read_state, wait_for_end
from sharmill.executors.slurm.queue import queued_jobs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def done_units(chain) -> list[int]:
    return sorted(read_ledger(chain.stage.dir, load_plan(chain.stage)))


def test_ranks_that_cannot_be_set_up_are_tried_three_times(make_chain):
    chain = make_chain(units=4, setup_does="raise:no GPU here", profile=make_profile(max_ranks=1))
    chain.start()
    state = wait_for_end(chain.run_dir)
    assert state.state == "failed"
    assert "no GPU here" in state.message
    assert len(chain.stage.pids()) == 3


def test_a_second_submission_is_refused_while_the_first_is_in_the_queue(make_chain):
    chain = make_chain(units=8, everywhere="wait:go", profile=make_profile(max_ranks=2))
    chain.start()
    with raises(ConfigError, "jobs_in_queue"):
        chain.start()
    with raises(ConfigError, "jobs_in_queue"):
        replace(chain, restart=True).start()
    assert read_state(chain.run_dir).state == "waiting"
    chain.stage.mark("go")
    assert wait_for_end(chain.run_dir).state == "done"


def test_when_all_jobs_are_cancelled_waiting_ends_and_a_new_submission_goes_on(make_chain):
    chain = make_chain(units=8, everywhere="wait:go", profile=make_profile(max_ranks=2))
    chain.start()
    slurm("scancel", *(job.id for job in queued_jobs(chain.run_dir)))
    with raises(FatalError, "jobs_gone"):
        wait_for_end(chain.run_dir)
    chain.stage.mark("go")
    wait_until(lambda: not queued_jobs(chain.run_dir))
    chain.start()
    assert wait_for_end(chain.run_dir).state == "done"


def test_what_slurm_refuses_leaves_no_job_behind(make_chain):
    """The ranks are accepted, the driver job behind them is not."""
    profile = make_profile()
    profile = replace(profile, cpu=replace(profile.cpu, partition="nowhere"))
    chain = make_chain(units=8, uses_gpu=True, profile=profile)
    with raises(FatalError, "jobs_refused", "invalid partition"):
        chain.start()
    assert read_state(chain.run_dir).state == "failed"
    wait_until(lambda: queued_jobs(chain.run_dir) == [])


def test_arrays_above_the_clusters_limit_are_split(make_chain, monkeypatch):
    monkeypatch.setattr(job_requests, "max_array_size", lambda patience: 3)
    chain = make_chain(units=8, everywhere="wait:go", profile=make_profile(max_ranks=8, max_parallel=4))
    state = chain.start()
    arrays = sorted({job.split("_")[0] for job in state.jobs[:-1]}, key=int)
    assert [sum(job.startswith(f"{array}_") for job in state.jobs) for array in arrays] == [3, 3, 2]
    assert [len(ranks) for ranks, _ in chain.executor().arrays(chain.stage, 8)] == [3, 3, 2]
    shown = slurm("squeue", "--noheader", "--format=%i", f"--jobs={','.join(arrays)}")
    limits = [slurm("scontrol", "show", "job", f"{array}") for array in arrays]
    assert ["ArrayTaskThrottle=1" in limit for limit in limits] == [True, True, True], shown
    chain.stage.mark("go")
    assert wait_for_end(chain.run_dir).state == "done"
    assert done_units(chain) == list(range(8))


def test_a_stage_with_too_many_rejects_stops_before_its_end(make_chain):
    options = {"units": 400, "seconds": 0.5, "everywhere": "reject:too_short,too_short"}
    chain = make_chain(**options, profile=make_profile(max_ranks=2))
    chain = replace(chain, dataset=replace(chain.dataset, max_reject_fraction=0.001))
    chain.start()
    state = wait_for_end(chain.run_dir)
    assert state.state == "failed"
    assert "max_reject_fraction=0.001" in state.message
    assert len(done_units(chain)) <= 4


SUBMIT = """
import sys
from pathlib import Path
import cloudpickle, os, signal
from sharmill.executors.slurm.executor import SlurmExecutor
chain = cloudpickle.loads(Path(sys.argv[1]).read_bytes())
def die(self, *arguments):
    os.kill(os.getpid(), signal.SIGKILL)
SlurmExecutor._submit_driver_job = die
chain.start()
"""


def test_a_submission_killed_between_ranks_and_driver_job_goes_on_when_started_again(make_chain, tmp_path):
    import cloudpickle

    chain = make_chain(units=8, seconds=0.3, profile=make_profile(max_ranks=2))
    pickled = tmp_path / "chain.pkl"
    pickled.write_bytes(cloudpickle.dumps(chain))
    environment = dict(line.removeprefix("export ").split("=", 1) for line in SETUP)
    killed = subprocess.run([sys.executable, "-c", SUBMIT, pickled], env=os.environ | environment, check=False)
    assert killed.returncode == -9
    assert read_state(chain.run_dir).message.startswith("the first jobs are being submitted by process ")
    assert "still in the queue, then driver job" in chain.start().message
    assert wait_for_end(chain.run_dir).state == "done"
    assert done_units(chain) == list(range(8))
    assert chain.stage.redone() == 0


def test_many_tiny_units_take_one_task_a_rank(make_chain):
    chain = make_chain(units=300)
    state = chain.start()
    assert len(state.jobs) == 4 + 1
    assert wait_for_end(chain.run_dir).state == "done"
    assert done_units(chain) == list(range(300))
