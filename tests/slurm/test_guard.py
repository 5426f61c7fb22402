"""While jobs of a run directory are in the queue nobody else works on it, however they were submitted."""

from __future__ import annotations

import os
import shutil

import pytest
import yaml
from support.errors import raises
from support.pipelines import run_sharmill
from support.toy_cluster import cancel_all, slurm

from sharmill.engine.reservations import make_run_id
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.executors.slurm.queue import job_comment, queued_jobs, require_no_jobs
from sharmill.files.host import user_name
from sharmill.files.staging import STAGING_NAME

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def run_dir(tmp_path):
    """A run directory from which jobs were submitted; no job of it is left behind."""
    run_dir = RunDir(tmp_path / "run")
    make_run_id(run_dir)
    run_dir.jobs.mkdir()
    yield run_dir
    cancel_all(run_dir)


def start_job(run_dir, *as_user):
    """Submit a job that carries the comment of a run directory's ranks, and return its number."""
    command = ["sbatch", "--parsable", f"--comment={job_comment(run_dir, 'rank')}", "--chdir=/", "--output=/dev/null"]
    return slurm(*as_user, *command, "--wrap=sleep 60").strip()


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("runuser") is None, reason="only root becomes another user")
def test_jobs_of_another_user_are_found(run_dir, monkeypatch):
    # Settings of squeue that would hide them.
    monkeypatch.setenv("SQUEUE_USERS", "root")
    number = start_job(run_dir, "runuser", "-u", "nobody", "--")
    with raises(ConfigError, "jobs_in_queue", number, "user nobody", f"scancel {number}"):
        require_no_jobs(run_dir)


def test_jobs_are_found_through_a_link_and_with_a_comment_of_the_site(run_dir, tmp_path):
    (tmp_path / "link").symlink_to(run_dir.path)
    comment = f"--comment=project x|y {job_comment(run_dir, 'rank')} z"
    number = slurm("sbatch", "--parsable", comment, "--output=/dev/null", "--array=0-1", "--wrap=sleep 60").strip()
    assert sorted(job.id for job in queued_jobs(RunDir(tmp_path / "link"))) == [f"{number}_0", f"{number}_1"]


def test_a_run_and_a_submission_are_refused_while_jobs_are_in_the_queue(tmp_path, make_config, run_dir):
    config = make_config(tmp_path)
    number = start_job(run_dir)
    for command in (["run", config], ["run", config, "--restart"], ["submit", "all", config, "--cluster", "local"]):
        refused = run_sharmill(*command)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert f"jobs {number} (user" in refused.stderr
    assert not (tmp_path / "run" / "prepare").exists()


def test_a_second_submission_for_a_dataset_is_refused_until_the_first_is_cancelled(tmp_path, make_config):
    profile = tmp_path / "profile.yaml"
    ranks = {"partition": "cpu", "max_ranks": 2, "memory_gb": 0.25, "extra": {"hold": True}}
    profile.write_text(yaml.safe_dump({"cpu": ranks}))
    first = make_config(tmp_path / "first", dataset_dir=str(tmp_path / "dataset"))
    second = make_config(tmp_path / "second", dataset_dir=str(tmp_path / "dataset"))
    submitted = run_sharmill("submit", "all", first, "--profile", profile)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    command = ["submit", "all", second, "--profile", profile]
    refused = run_sharmill(*command, env=os.environ | {"COLUMNS": "1000"})
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert f"is reserved: {user_name()} on {os.uname().nodename}" in refused.stdout
    assert f"from {tmp_path / 'first' / 'run'}" in refused.stdout
    assert not (tmp_path / "second" / "run" / "prepare").exists()
    assert run_sharmill("cancel", tmp_path / "first" / "run").returncode == 0
    assert not (tmp_path / "dataset" / STAGING_NAME).exists()
    assert run_sharmill(*command).returncode == 0
