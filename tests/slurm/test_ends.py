"""However the driver jobs of a chain end, the chain goes on or its end is noted, and status says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.pipelines import run_sharmill
from support.toy_cluster import SETUP, MortalStage, ToyChain, assert_same_as_local, make_profile, slurm
from support.toy_stage import wait_until

from sharmill.engine.rundir import RunDir
from sharmill.executors.slurm.chain_state import read_state, wait_for_end
from sharmill.executors.slurm.queue import queued_jobs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def roles(chain) -> dict[str, str]:
    """The numbers of the jobs in the queue that are no ranks, by role."""
    return {job.role: job.id for job in queued_jobs(chain.run_dir) if job.role != "rank"}


@pytest.fixture
def make_mortal(tmp_path, make_chain):
    """Returns a function: how the driver jobs end, one after the other -> a chain that was started."""

    def make(*ends: str, **options) -> ToyChain:
        chain = make_chain(units=4, profile=make_profile(max_ranks=2), **options)
        stage = MortalStage(tmp_path, units=4)
        for end in ends:
            stage.mark("ends", end)
        chain = replace(chain, dataset=replace(chain.dataset, stage=stage), command="sharmill submit all c.yaml")
        chain.start()
        return chain

    return make


@pytest.mark.parametrize("how", ["kill", "scancel", "error", "requeue"])
def test_a_driver_job_that_ends_in_the_middle_is_continued_by_its_watcher_job(make_mortal, tmp_path, how):
    chain = make_mortal(how)
    assert wait_for_end(chain.run_dir).state == "done"
    assert queued_jobs(chain.run_dir) == []
    assert_same_as_local(chain, tmp_path)
    assert chain.stage.redone() == 0


def test_an_error_that_does_not_pass_is_noted_by_the_watcher_job(make_mortal):
    state = wait_for_end(make_mortal("error", "error").run_dir)
    assert state.state == "failed"
    assert "OSError: [Errno 39] Directory not empty" in state.message


def test_where_python_cannot_note_it_the_shell_of_the_watcher_job_does(make_mortal):
    chain = make_mortal("kill", "kill")
    state = wait_for_end(chain.run_dir)
    assert state.state == "failed"
    assert "so did the watcher job behind it" in state.message
    assert state.command == "sharmill submit all c.yaml"


def test_a_setup_line_that_ends_the_script_is_noted(make_chain):
    """The driver jobs cannot even begin."""
    profile = make_profile()
    chain = make_chain(units=4, uses_gpu=True, profile=replace(profile, setup=[*SETUP, "exit 7"]))
    chain.start()
    assert wait_for_end(chain.run_dir).state == "failed"


def test_the_watcher_job_leaves_the_queue_with_the_chain(make_chain):
    chain = make_chain(units=4, everywhere="wait:go", profile=make_profile(max_ranks=2))
    chain.start()
    assert set(roles(chain)) == {"driver", "watcher"}
    chain.stage.mark("go")
    assert wait_for_end(chain.run_dir).state == "done"
    assert queued_jobs(chain.run_dir) == []


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
    assert read_state(run_dir).state == "waiting"
    shown = " ".join(run_sharmill("status", tmp_path / "run").stdout.split())
    assert "its jobs are gone: submit again: cd " in shown
    assert "in the queue" not in shown
    assert f"sharmill submit prepare {config} --profile {profile}" in shown.replace("\n", "")
