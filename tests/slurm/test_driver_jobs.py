"""Driver jobs of a chain that meet jobs, locks and signals at awkward moments."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.paths import SHARED
from support.toy_cluster import SETUP, assert_same_as_local, make_profile, running_ranks, slurm
from support.toy_stage import wait_until

from sharmill.engine.attempts import Attempts, describe_slots_out
from sharmill.engine.host import is_gone
from sharmill.engine.run import locked
from sharmill.executors.slurm.chain_state import read_state, wait_for_end
from sharmill.executors.slurm.profile import StageProfile, StageProfiles
from sharmill.executors.slurm.queue import outside_own_job, queued_jobs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

START = SHARED / "slurm" / "start.sh"


@pytest.fixture
def waiting_chain(make_chain):
    """Two ranks that wait for the mark ``go``, and the driver job behind them."""
    chain = make_chain(units=8, everywhere="wait:go", profile=make_profile(max_ranks=2))
    chain.start()
    return chain


def driver_jobs(chain) -> list[str]:
    return [job.id for job in queued_jobs(chain.run_dir) if job.role == "driver"]


def driver_states(chain):
    return [job.state for job in queued_jobs(chain.run_dir) if job.role == "driver"]


def test_a_driver_job_requeued_after_it_has_submitted_leaves_the_work_to_the_next(waiting_chain, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    before = queued_jobs(waiting_chain.run_dir)
    state = read_state(waiting_chain.run_dir)
    waiting_chain()
    assert read_state(waiting_chain.run_dir) == state
    assert {job.id for job in queued_jobs(waiting_chain.run_dir)} == {job.id for job in before}


def test_a_driver_job_that_meets_ranks_only_submits_one_behind_them(waiting_chain, monkeypatch, tmp_path):
    (own,) = driver_jobs(waiting_chain)
    monkeypatch.setenv("SLURM_JOB_ID", own)
    waiting_chain()
    state = read_state(waiting_chain.run_dir)
    slurm("scancel", own)
    monkeypatch.delenv("SLURM_JOB_ID")
    wait_until(lambda: driver_jobs(waiting_chain) == state.jobs[-1:])
    waiting_chain.stage.mark("go")
    assert wait_for_end(waiting_chain.run_dir).state == "done"
    assert_same_as_local(waiting_chain, tmp_path)
    assert waiting_chain.stage.redone() == 0


def test_one_that_is_killed_within_a_small_stage_leaves_the_rest_to_ranks(make_chain, tmp_path):
    chain = make_chain(units=4, behaviour={3: "kill_once"}, profile=make_profile(driver_units=4))
    chain.start()
    assert sorted(job.role for job in queued_jobs(chain.run_dir)) == ["driver", "watcher"]
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    assert chain.stage.redone() == 1


def test_a_driver_job_waits_until_the_run_directory_is_free(waiting_chain, tmp_path):
    chain = waiting_chain
    wait_until(lambda: len(running_ranks(chain)) == 2)
    with locked(chain.run_dir):
        chain.stage.mark("go")
        wait_until(lambda: not [job for job in queued_jobs(chain.run_dir) if job.role == "rank"])
        wait_until(lambda: driver_states(chain) == ["RUNNING"])
        time.sleep(2)  # long enough to have failed; nothing tells that it waits
        assert driver_states(chain) == ["RUNNING"]
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)


@pytest.mark.parametrize("where", ["setup", "unit"])
def test_a_rank_told_to_leave_comes_back_without_stale_state(make_chain, tmp_path, where):
    """In the middle of loading its model, or of a unit with the model loaded, which cannot be pickled."""
    options = {"setup_does": "wait:go"} if where == "setup" else {"everywhere": "wait:go"}
    chain = make_chain(units=4, profile=make_profile(max_ranks=1), **options)
    rank = chain.start().jobs[0]
    wait_until(lambda: chain.stage.marked("setup" if where == "setup" else "attempts"))
    slurm("scancel", "--signal=USR2", rank)
    wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", rank))
    chain.stage.mark("go")
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    assert describe_slots_out(chain.stage.dir) == []
    attempts = Attempts(chain.stage.dir.attempts)
    attempts.look()
    assert [attempts.num_failures(unit) for unit in range(4)] == [0] * 4
    assert chain.stage.redone() == (0 if where == "setup" else 1)


def test_a_job_hides_its_allocation_from_sbatch_and_keeps_it_for_itself(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SBATCH_PARTITION", "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    with outside_own_job():
        assert {name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))} == {"SLURM_CONF"}
    assert os.environ["SLURM_JOB_ID"] == "1"
    monkeypatch.delenv("SLURM_JOB_ID")
    with outside_own_job():
        assert os.environ["SBATCH_PARTITION"] == "1"


def test_a_slow_dataset_does_not_hold_up_another(make_chain, tmp_path):
    slow = make_chain(folder=tmp_path / "slow", units=4, everywhere="wait:go", profile=make_profile(max_ranks=2))
    quick = make_chain(folder=tmp_path / "quick", units=4, profile=make_profile(max_ranks=2))
    for chain in (slow, quick):
        chain.start()
    assert wait_for_end(quick.run_dir).state == "done"
    assert read_state(slow.run_dir).state == "waiting"
    slow.stage.mark("go")
    assert wait_for_end(slow.run_dir).state == "done"


def test_restart_does_the_whole_stage_again(make_chain, tmp_path):
    chain = make_chain(units=4)
    chain.start()
    assert wait_for_end(chain.run_dir).state == "done"
    replace(chain, restart=True).start()
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    assert chain.stage.redone() == 4


@pytest.mark.skipif(os.getuid() != 0 or not START.exists(), reason="only root stops the controller of the test cluster")
def test_a_driver_job_that_meets_no_controller_waits_has_itself_requeued_and_goes_on(make_chain, tmp_path):
    """A driver job of one minute waits for eighteen seconds, and then asks for its requeue as long as it may."""
    hold = tmp_path / "hold"
    hold.touch()
    line = f"case $SLURM_JOB_NAME in *driver) while [ -e {shlex.quote(str(hold))} ]; do sleep 0.2; done;; esac"
    profile = make_profile(setup=[*SETUP, line], stages=StageProfiles(driver=StageProfile(timeout_min=1)))
    chain = make_chain(units=4, profile=profile)
    chain.start()
    wait_until(lambda: driver_states(chain) == ["RUNNING"])
    (driver,) = driver_jobs(chain)
    pid = int(Path(slurm_setting("SlurmctldPidFile")).read_text())
    os.kill(pid, signal.SIGTERM)
    try:
        wait_until(lambda: is_gone(pid))
        hold.unlink()
        wait_until(lambda: "ends" in chain_log(chain))
    finally:
        subprocess.run(["bash", START], check=True, capture_output=True)
    wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", driver))
    assert wait_for_end(chain.run_dir).state == "done"
    assert "does not answer squeue" in chain_log(chain)
    assert_same_as_local(chain, tmp_path)
    assert chain.stage.redone() == 0


def slurm_setting(name):
    return re.search(rf"^{name}\s*=\s*(\S+)", slurm("scontrol", "show", "config"), re.MULTILINE)[1]


def chain_log(chain):
    return chain.run_dir.chain_log.read_text() if chain.run_dir.chain_log.exists() else ""
