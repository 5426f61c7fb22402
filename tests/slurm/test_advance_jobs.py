"""Advance jobs on a real SLURM: however they end, the run goes on, or status says that it does not."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.errors import raises
from support.paths import SHARED
from support.pipelines import run_sharmill
from support.toy_cluster import SETUP, MiddleStage, MortalStage, assert_same_as_local, make_profile, slurm
from support.toy_stage import wait_until

from sharmill.engine.run_notes import read_end
from sharmill.engine.rundir import RunDir
from sharmill.errors import FatalError
from sharmill.executors.slurm.queue import queued_jobs, wait_for_end
from sharmill.files.host import is_gone
from sharmill.files.locks import lock_owner

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

START = SHARED / "slurm" / "start.sh"


@pytest.fixture
def start_mortal(make_run):
    """Returns a function: how the advance jobs end, one after the other -> a run that was started."""

    def start(*ends: str):
        run = make_run(kind=MortalStage, units=4, profile=make_profile(max_ranks=2))
        for end in ends:
            run.stage.mark("ends", end)
        run.start()
        return run

    return start


@pytest.mark.parametrize("how", ["kill", "scancel", "requeue", "error"])
def test_one_that_ends_in_the_middle_is_continued_by_its_second_job(start_mortal, tmp_path, how):
    run = start_mortal(how)
    assert wait_for_end(run.run_dir).state == "done"
    assert queued_jobs(run.run_dir) == []
    assert_same_as_local(run, tmp_path)
    assert run.stage.redone() == 0


def test_an_error_that_does_not_pass_is_noted_by_the_second_job(start_mortal):
    end = wait_for_end(start_mortal("error", "error").run_dir)
    assert end.state == "failed"
    assert "RuntimeError: nobody thought of this" in end.message


def test_where_no_job_can_note_the_end_waiting_for_it_tells_the_reason(make_run):
    """A setup line ends the scripts of all of them."""
    line = "echo 'module: command not found' >&2; false"
    run = make_run(units=4, profile=replace(make_profile(max_ranks=2), setup=[*SETUP, line]))
    run.start()
    with raises(FatalError, "jobs_gone", "module: command not found", "setup line failed with status 1"):
        wait_for_end(run.run_dir)


def test_one_that_is_killed_within_a_small_stage_leaves_the_rest_to_ranks(make_run, tmp_path):
    run = make_run(units=4, behaviour={3: "kill_once"}, profile=make_profile(driver_units=4))
    run.start()
    assert sorted(job.role for job in queued_jobs(run.run_dir)) == ["advance", "second"]
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, tmp_path)
    assert run.stage.redone() == 1


def test_one_in_the_middle_of_a_small_stage_ends_at_once_when_the_run_is_cancelled(make_run):
    """Without srun only its own handler has it end before SLURM kills it, and it would submit more until then."""
    run = make_run(units=2, seconds=600.0, profile=make_profile(driver_units=4))
    run.start()
    wait_until(lambda: run.stage.marked("begun"))
    run.run_dir.config.touch()
    assert run_sharmill("cancel", str(run.run_dir.path)).returncode == 0
    assert lock_owner(run.run_dir.path) is None
    assert read_end(run.run_dir).message.startswith("cancelled by ")


def advance_jobs(run):
    return [job for job in queued_jobs(run.run_dir) if job.role == "advance"]


def advance_log(run) -> str:
    return run.run_dir.advance_log.read_text() if run.run_dir.advance_log.exists() else ""


@pytest.mark.skipif(os.getuid() != 0 or not START.exists(), reason="only root stops the controller of the test cluster")
def test_one_that_meets_no_controller_waits_has_itself_requeued_and_goes_on(make_run, tmp_path):
    """An advance job of one minute waits for fifteen seconds, and then asks for its requeue as long as it may."""
    hold = tmp_path / "hold"
    hold.touch()
    line = f"case $SLURM_JOB_NAME in *advance) while [ -e {shlex.quote(str(hold))} ]; do sleep 0.2; done;; esac"
    profile = make_profile(setup=[*SETUP, line], stages={"driver": {"timeout_min": 1}})
    # It has a second stage to submit.
    run = make_run(units=4, later=(MiddleStage(tmp_path, units=4),), profile=profile)
    run.start()
    wait_until(lambda: [job.state for job in advance_jobs(run)] == ["RUNNING"])
    (driver,) = advance_jobs(run)
    pid_file = re.search(r"^SlurmctldPidFile\s*=\s*(\S+)", slurm("scontrol", "show", "config"), re.MULTILINE)[1]
    pid = int(Path(pid_file).read_text())
    os.kill(pid, signal.SIGTERM)
    try:
        wait_until(lambda: is_gone(pid))
        hold.unlink()
        wait_until(lambda: "ends" in advance_log(run))
    finally:
        subprocess.run(["bash", START], check=True, capture_output=True)
    wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", driver.id))
    assert wait_for_end(run.run_dir).state == "done"
    assert "does not answer squeue" in advance_log(run)
    assert_same_as_local(run, tmp_path)
    assert run.stage.redone() == 0


def test_status_says_what_is_in_the_queue_and_that_jobs_are_gone(tmp_path, make_config):
    config = make_config(tmp_path)
    profile = tmp_path / "profile.yaml"
    profile.write_text("cpu: {partition: cpu, max_ranks: 2, memory_gb: 1.0, extra: {begin: now+1hour}}")
    submitted = run_sharmill("submit", "prepare", config, "--profile", profile)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    # SLURM gives the reason some time after it has taken the jobs.
    wait_until(lambda: "and 1 more: PENDING (BeginTime)" in run_sharmill("status", tmp_path / "run").stdout)
    run_dir = RunDir(tmp_path / "run")
    slurm("scancel", *(job.id for job in queued_jobs(run_dir)))
    wait_until(lambda: not queued_jobs(run_dir))
    shown = " ".join(run_sharmill("status", tmp_path / "run").stdout.split())
    assert "no job is left though work is: submit again: cd " in shown
    assert "in the queue" not in shown
    assert f"sharmill submit prepare {config} --profile {profile}" in shown.replace("\n", "")
