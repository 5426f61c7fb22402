"""Driver jobs on a real SLURM: whatever ends them, the run continues, or status reports that it does not.

While jobs of a run directory are in the queue, no other run uses it, however the jobs were submitted.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.project import raises, run_sharmill
from support.toy_cluster import (
    SETUP,
    SHARED,
    MiddleStage,
    MortalStage,
    assert_same_as_local,
    cancel_all,
    make_profile,
    slurm,
)
from support.toy_stage import wait_until

from sharmill.engine.run_dir import RunDir
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm.executor import job_comment, wait_for_end
from sharmill.executors.slurm.queue import queued_jobs, require_no_jobs
from sharmill.files.host import is_gone, user_name
from sharmill.files.locks import lock_owner
from sharmill.files.staging import STAGING_NAME

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

START = SHARED / "slurm" / "start.sh"


@pytest.fixture
def start_mortal(make_run):
    """Return a function: the ends of successive driver jobs -> a started run."""

    def start(*ends: str):
        run = make_run(kind=MortalStage, units=4, profile=make_profile(max_ranks=2))
        for end in ends:
            run.stage.mark("ends", end)
        run.start()
        return run

    return start


@pytest.mark.parametrize("how", ["kill", "scancel", "requeue", "error"])
def test_the_second_job_continues_an_advance_job_that_dies(start_mortal, tmp_path, how):
    run = start_mortal(how)
    assert wait_for_end(run.run_dir).state == "done"
    assert queued_jobs(run.run_dir) == []
    assert_same_as_local(run, tmp_path)
    assert run.stage.redone() == 0


def test_waiting_for_jobs_that_cannot_start_gives_the_reason(make_run):
    """A setup line fails in the scripts of all jobs."""
    line = "echo 'module: command not found' >&2; false"
    run = make_run(units=4, profile=replace(make_profile(max_ranks=2), setup=[*SETUP, line]))
    run.start()
    with raises(FatalError, "jobs_gone", "module: command not found", "setup line failed with status 1"):
        wait_for_end(run.run_dir)


def test_ranks_continue_a_small_stage_of_a_killed_advance_job(make_run, tmp_path):
    run = make_run(units=4, behaviour={3: "kill_once"}, profile=make_profile(driver_units=4))
    run.start()
    assert sorted(job.role for job in queued_jobs(run.run_dir)) == ["advance", "second"]
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, tmp_path)
    assert run.stage.redone() == 1


def test_cancel_ends_an_advance_job_in_a_small_stage_at_once(make_run):
    """Outside of srun, only its own signal handler ends it early; without that, it would submit more jobs."""
    run = make_run(units=2, seconds=600.0, profile=make_profile(driver_units=4))
    run.start()
    wait_until(lambda: run.stage.marked("attempts"))
    run.run_dir.config.touch()
    run_sharmill("cancel", str(run.run_dir.path))
    assert lock_owner(run.run_dir.path) is None
    assert run.run_dir.read_outcome().message.startswith("cancelled by ")


def advance_jobs(run):
    return [job for job in queued_jobs(run.run_dir) if job.role == "advance"]


def advance_log(run) -> str:
    return run.run_dir.advance_log.read_text() if run.run_dir.advance_log.exists() else ""


@pytest.mark.skipif(os.getuid() != 0 or not START.exists(), reason="only root stops the controller of the test cluster")
def test_an_advance_job_without_a_controller_is_requeued(make_run, tmp_path):
    """A driver job with a time limit of one minute waits for fifteen seconds, and then requests its requeue."""
    hold = tmp_path / "hold"
    hold.touch()
    line = f"case $SLURM_JOB_NAME in *advance) while [ -e {shlex.quote(str(hold))} ]; do sleep 0.2; done;; esac"
    profile = make_profile(setup=[*SETUP, line], stages={"driver": {"timeout_min": 1}})
    # After the first stage, it must submit a second one.
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
        wait_until(lambda: f"job {driver.id} failed" in advance_log(run))
    finally:
        subprocess.run(["bash", START], check=True, capture_output=True)
    wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", driver.id))
    assert wait_for_end(run.run_dir).state == "done"
    assert "does not answer squeue" in advance_log(run)
    assert_same_as_local(run, tmp_path)
    assert run.stage.redone() == 0


def test_status_shows_queued_jobs_and_missing_jobs(tmp_path, make_config):
    config = make_config(tmp_path)
    profile = tmp_path / "profile.yaml"
    profile.write_text("cpu: {partition: cpu, max_ranks: 2, memory_gb: 1.0, extra: {begin: now+1hour}}")
    run_sharmill("submit", "prepare", config, "--profile", profile)
    # SLURM shows the reason only some time after the submission.
    wait_until(
        lambda: "and 1 more: PENDING (BeginTime)" in run_sharmill("status", tmp_path / "run", status=None).stdout
    )
    run_dir = RunDir(tmp_path / "run")
    slurm("scancel", *(job.id for job in queued_jobs(run_dir)))
    wait_until(lambda: not queued_jobs(run_dir))
    shown = " ".join(run_sharmill("status", tmp_path / "run", status=None).stdout.split())
    assert "work is left, but no job for it: submit again: cd " in shown
    assert "in the queue" not in shown
    assert f"sharmill submit prepare {config} --profile {profile}" in shown.replace("\n", "")


@pytest.fixture
def run_dir(tmp_path):
    """A run directory from which jobs were submitted; they are cancelled after the test."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.make_id()
    run_dir.jobs.mkdir()
    yield run_dir
    cancel_all(run_dir)


def start_job(run_dir, *as_user):
    """Submit a job with the comment of a run directory's ranks, and return its id."""
    command = ["sbatch", "--parsable", f"--comment={job_comment(run_dir, 'rank')}", "--chdir=/", "--output=/dev/null"]
    return slurm(*as_user, *command, "--wrap=sleep 60").strip()


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("runuser") is None, reason="only root becomes another user")
def test_jobs_of_another_user_are_found(run_dir, monkeypatch):
    # This setting would make squeue hide them.
    monkeypatch.setenv("SQUEUE_USERS", "root")
    number = start_job(run_dir, "runuser", "-u", "nobody", "--")
    with raises(ConfigError, "jobs_in_queue", number, "user nobody", f"scancel {number}"):
        require_no_jobs(run_dir)


def test_jobs_are_found_through_a_link_and_a_longer_comment(run_dir, tmp_path):
    (tmp_path / "link").symlink_to(run_dir.path)
    comment = f"--comment=project x|y {job_comment(run_dir, 'rank')} z"
    number = slurm("sbatch", "--parsable", comment, "--output=/dev/null", "--array=0-1", "--wrap=sleep 60").strip()
    assert sorted(job.id for job in queued_jobs(RunDir(tmp_path / "link"))) == [f"{number}_0", f"{number}_1"]


def test_a_second_submission_is_refused_until_a_cancel(tmp_path, make_config):
    profile = tmp_path / "profile.yaml"
    ranks = {"partition": "cpu", "max_ranks": 2, "memory_gb": 0.25, "extra": {"hold": True}}
    profile.write_text(yaml.safe_dump({"cpu": ranks}))
    first = make_config(tmp_path / "first", dataset_dir=str(tmp_path / "dataset"))
    second = make_config(tmp_path / "second", dataset_dir=str(tmp_path / "dataset"))
    run_sharmill("submit", "all", first, "--profile", profile)
    command = ["submit", "all", second, "--profile", profile]
    refused = run_sharmill(*command, env=os.environ | {"COLUMNS": "1000"}, status=2)
    said = refused.stdout + refused.stderr
    assert f"is reserved: {user_name()} on {os.uname().nodename}" in said
    assert f"from {tmp_path / 'first' / 'run'}" in said
    assert not (tmp_path / "second" / "run" / "prepare").exists()
    run_sharmill("cancel", tmp_path / "first" / "run")
    assert not (tmp_path / "dataset" / STAGING_NAME).exists()
    run_sharmill(*command)
