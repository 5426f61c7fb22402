"""Advance jobs of a run that meet jobs, locks and signals at awkward moments."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.paths import SHARED
from support.toy_cluster import SETUP, MiddleStage, assert_same_as_local, make_profile, slurm
from support.toy_stage import wait_until

from sharmill.engine.attempts import Attempts, describe_slots_out
from sharmill.engine.host import is_gone
from sharmill.executors.slurm.profile import StageProfile, StageProfiles
from sharmill.executors.slurm.queue import queued_jobs, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

START = SHARED / "slurm" / "start.sh"


def advance_jobs(run) -> list[str]:
    return [job.id for job in queued_jobs(run.run_dir) if job.role == "advance"]


def advance_states(run):
    return [job.state for job in queued_jobs(run.run_dir) if job.role == "advance"]


def test_one_that_is_killed_within_a_small_stage_leaves_the_rest_to_ranks(make_run, tmp_path):
    run = make_run(units=4, behaviour={3: "kill_once"}, profile=make_profile(driver_units=4))
    run.start()
    assert sorted(job.role for job in queued_jobs(run.run_dir)) == ["advance", "second"]
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, tmp_path)
    assert run.stage.redone() == 1


@pytest.mark.parametrize("where", ["setup", "unit"])
def test_a_rank_told_to_leave_comes_back_without_stale_state(make_run, tmp_path, where):
    """In the middle of loading its model, or of a unit with the model loaded, which cannot be pickled."""
    options = {"setup_does": "wait:go"} if where == "setup" else {"everywhere": "wait:go"}
    run = make_run(units=4, profile=make_profile(max_ranks=1), **options)
    rank = run.start().jobs[0]
    wait_until(lambda: run.stage.marked("setup" if where == "setup" else "attempts"))
    slurm("scancel", "--signal=USR2", rank)
    wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", rank))
    run.stage.mark("go")
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, tmp_path)
    assert describe_slots_out(run.stage.dir) == []
    attempts = Attempts(run.stage.dir.attempts)
    attempts.look()
    assert [attempts.num_failures(unit) for unit in range(4)] == [0] * 4
    assert run.stage.redone() == (0 if where == "setup" else 1)


def test_restart_does_the_whole_stage_again(make_run, tmp_path):
    run = make_run(units=4)
    run.start()
    assert wait_for_end(run.run_dir).state == "done"
    replace(run, restart=True).start()
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, tmp_path)
    assert run.stage.redone() == 4


@pytest.mark.skipif(os.getuid() != 0 or not START.exists(), reason="only root stops the controller of the test cluster")
def test_an_advance_job_that_meets_no_controller_waits_has_itself_requeued_and_goes_on(make_run, tmp_path):
    """An advance job of one minute waits for fifteen seconds, and then asks for its requeue as long as it may."""
    hold = tmp_path / "hold"
    hold.touch()
    line = f"case $SLURM_JOB_NAME in *advance) while [ -e {shlex.quote(str(hold))} ]; do sleep 0.2; done;; esac"
    profile = make_profile(setup=[*SETUP, line], stages=StageProfiles(driver=StageProfile(timeout_min=1)))
    # It has a second stage to submit.
    run = make_run(units=4, later=(MiddleStage(tmp_path, units=4),), profile=profile)
    run.start()
    wait_until(lambda: advance_states(run) == ["RUNNING"])
    (driver,) = advance_jobs(run)
    pid = int(Path(slurm_setting("SlurmctldPidFile")).read_text())
    os.kill(pid, signal.SIGTERM)
    try:
        wait_until(lambda: is_gone(pid))
        hold.unlink()
        wait_until(lambda: "ends" in advance_log(run))
    finally:
        subprocess.run(["bash", START], check=True, capture_output=True)
    wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", driver))
    assert wait_for_end(run.run_dir).state == "done"
    assert "does not answer squeue" in advance_log(run)
    assert_same_as_local(run, tmp_path)
    assert run.stage.redone() == 0


def slurm_setting(name):
    return re.search(rf"^{name}\s*=\s*(\S+)", slurm("scontrol", "show", "config"), re.MULTILINE)[1]


def advance_log(run):
    return run.run_dir.advance_log.read_text() if run.run_dir.advance_log.exists() else ""
