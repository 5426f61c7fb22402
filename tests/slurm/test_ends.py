"""However the advance jobs of a run end, the run goes on or its end is noted, and status says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.pipelines import run_sharmill
from support.toy_cluster import SETUP, MortalStage, ToyRun, assert_same_as_local, make_profile, slurm
from support.toy_stage import wait_until

from sharmill.engine.run_notes import read_end
from sharmill.engine.rundir import RunDir
from sharmill.executors.slurm.queue import queued_jobs, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def make_mortal(tmp_path, make_run):
    """Returns a function: how the advance jobs end, one after the other -> a run that was started."""

    def make(*ends: str, **options) -> ToyRun:
        run = make_run(units=4, profile=make_profile(max_ranks=2), **options)
        stage = MortalStage(tmp_path, units=4)
        for end in ends:
            stage.mark("ends", end)
        run = replace(run, dataset=replace(run.dataset, stage=stage))
        run.start()
        return run

    return make


@pytest.mark.parametrize("how", ["kill", "scancel", "requeue"])
def test_an_advance_job_that_ends_in_the_middle_is_continued_by_its_second_job(make_mortal, tmp_path, how):
    run = make_mortal(how)
    assert wait_for_end(run.run_dir).state == "done"
    assert queued_jobs(run.run_dir) == []
    assert_same_as_local(run, tmp_path)
    assert run.stage.redone() == 0


def test_an_error_that_does_not_pass_is_noted_by_the_second_job(make_mortal):
    end = wait_for_end(make_mortal("error", "error").run_dir)
    assert end.state == "failed"
    assert "RuntimeError: nobody thought of this" in end.message


def test_where_python_cannot_note_it_the_shell_of_the_second_job_does(make_mortal):
    run = make_mortal("kill", "kill")
    end = wait_for_end(run.run_dir)
    assert end.state == "failed"
    assert "so did the job behind it" in end.message


def test_a_setup_line_that_ends_the_script_is_noted(make_run):
    """The advance jobs cannot even begin."""
    profile = make_profile()
    run = make_run(units=4, uses_gpu=True, profile=replace(profile, setup=[*SETUP, "exit 7"]))
    run.start()
    assert wait_for_end(run.run_dir).state == "failed"


def test_status_says_what_is_in_the_queue_and_that_jobs_are_gone(tmp_path, make_config):
    config = make_config(tmp_path)
    profile = tmp_path / "profile.yaml"
    profile.write_text("cpu: {partition: cpu, max_ranks: 2, memory_gb: 1.0, extra: {begin: now+1hour}}")
    submitted = run_sharmill("submit", "prepare", config, "--profile", profile)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    # SLURM gives the reason some time after it has taken the jobs.
    wait_until(lambda: "and 1 more: PENDING (BeginTime)" in run_sharmill("status", tmp_path / "run").stdout)
    assert "in the queue" in run_sharmill("status", tmp_path / "run").stdout
    run_dir = RunDir(tmp_path / "run")
    slurm("scancel", *(job.id for job in queued_jobs(run_dir)))
    wait_until(lambda: not queued_jobs(run_dir))
    assert read_end(run_dir) is None
    shown = " ".join(run_sharmill("status", tmp_path / "run").stdout.split())
    assert "no job is left though work is: submit again: cd " in shown
    assert "in the queue" not in shown
    assert f"sharmill submit prepare {config} --profile {profile}" in shown.replace("\n", "")
