"""Driver jobs where the cluster is a few scripts: the wait for a controller that is away, and the note of an end."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.errors import raises
from support.toy_stage import ToyStage
from tenacity import retry_if_exception_type

from sharmill.engine.fence import claim_for_run
from sharmill.engine.run import locked
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm import chain as slurm_chain
from sharmill.executors.slurm.chain import JobChain
from sharmill.executors.slurm.chain_state import read_state
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.queue import SlurmSilent, competing_jobs, job_comment, make_run_id, retrying
from sharmill.staging import STAGING_NAME


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A command that notes what it is called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/orders\n')
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return tmp_path / "orders"


@pytest.fixture
def driver_job(tmp_path):
    """The driver job of a chain, under a time limit of ten minutes."""
    dataset = SimpleNamespace(name="toy", run_dir=tmp_path / "run", make_stages=lambda: [])
    chain = JobChain(dataset, ClusterProfile(cpu=RankProfile(timeout_min=10)), command="sharmill submit all c.yaml")
    return chain.executor().driver_job


def test_a_driver_job_waits_for_a_part_of_its_own_time_limit(driver_job):
    assert driver_job.patience == 180.0


def meet(job, error):
    """Have the stages of a driver job end with an error."""

    def run(executor, listener, *, restart, wait_seconds):
        raise error

    job.dataset.run = run


def test_one_that_has_waited_as_long_as_it_may_is_requeued(driver_job, scontrol):
    meet(driver_job, SlurmSilent("SLURM does not answer squeue"))
    replace(driver_job, patience=0.0)()
    assert scontrol.read_text() == "requeue 17\n"
    state = read_state(driver_job.run_dir)
    assert state.state == "waiting"
    assert "it is requeued" in state.message


@pytest.mark.parametrize(
    ("error", "restarts", "patience"),
    [
        # For the 240th time: twelve hours.
        (SlurmSilent("SLURM does not answer"), "239", 180.0),
        # At once: it is not the wait that ends it.
        (FatalError("Invalid qos specification", code="jobs_refused"), "0", 180.0),
        (FatalError("the disk is full", code="disk"), "0", 0.0),
    ],
)
def test_what_will_not_pass_ends_the_chain(driver_job, scontrol, monkeypatch, error, restarts, patience):
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    times = [0.0] + 1000 * [200.0 if restarts != "0" else 1.0]
    monkeypatch.setattr(time, "monotonic", iter(times).__next__)
    meet(driver_job, error)
    with raises(type(error), error.code):
        replace(driver_job, patience=patience)()
    assert not scontrol.exists()
    assert read_state(driver_job.run_dir).state == "failed"


def test_where_it_cannot_be_requeued_its_watcher_job_goes_on(driver_job, scontrol, monkeypatch, tmp_path):
    (tmp_path / "bin/scontrol").write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    monkeypatch.setattr(slurm_chain, "PATIENCE_SECONDS", 0.5)
    meet(driver_job, SlurmSilent("SLURM does not answer squeue"))
    with raises(SlurmSilent, "silent_cluster"):
        replace(driver_job, patience=0.0)()
    state = read_state(driver_job.run_dir)
    assert (state.state, "its watcher job goes on" in state.message) == ("waiting", True)


@pytest.mark.parametrize("state", ["done", "failed"])
def test_the_command_of_the_profile_is_told_of_the_end(driver_job, scontrol, tmp_path, state):
    said = tmp_path / "said"
    command = f'cat > {said}; echo "$SHARMILL_NAME $SHARMILL_STATE $SHARMILL_FINDINGS $SHARMILL_RUN_DIR" >> {said}'
    job = replace(driver_job, profile=replace(driver_job.profile, notify=command))
    message = "there is no stage to run" if state == "done" else 'it\'s "over" $(touch no)'
    job.dataset.run = lambda *_, **options: SimpleNamespace(stages=[])
    if state == "failed":
        meet(job, FatalError(message, code="disk"))
    with nullcontext() if state == "done" else raises(FatalError, "disk"):
        job()
    assert said.read_text() == f"{message}\ntoy {state} 0 {job.run_dir.path}\n"


@pytest.mark.parametrize("command", ["echo no such user >&2; exit 3", "printf 'no such user \\xff' >&2; exit 3"])
def test_a_command_that_fails_changes_nothing(driver_job, scontrol, command):
    job = replace(driver_job, profile=replace(driver_job.profile, notify=command))
    job.dataset.run = lambda *_, **options: SimpleNamespace(stages=[])
    job()
    assert read_state(job.run_dir).state == "done"
    assert "no such user" in job.run_dir.chain_log.read_text()


def test_a_wait_lasts_as_long_as_it_was_to_and_no_longer(monkeypatch):
    """Else a driver job that gave up a little early would be taken for one that did not wait, and end its chain."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def refuse():
        raise OSError("busy")

    with pytest.raises(OSError, match="busy"):
        retrying(1080.0, retry_if_exception_type(OSError))(refuse)
    assert now[0] == 1080.0


def test_a_submission_whose_place_another_process_takes_notes_its_end(driver_job, scontrol, monkeypatch, tmp_path):
    """In between it does not hold the run directory, which a ``sharmill run`` may enter."""
    for name in ("sbatch", "squeue"):
        (tmp_path / "bin" / name).write_text("#!/bin/bash\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.delenv("SLURM_JOB_ID")
    meet(driver_job, ConfigError("another sharmill process is at work", code="locked"))
    with raises(ConfigError, "locked"):
        driver_job.start()
    state = read_state(driver_job.run_dir)
    assert (state.state, state.message) == ("failed", "another sharmill process is at work")


def test_one_that_another_process_has_put_out_of_the_run_directory_leaves_the_chain_to_that(driver_job, scontrol):
    """It noted a failure, and cancelled the watcher job of the one at work."""
    meet(driver_job, FatalError("another process took the lock over", code="locked"))
    with raises(FatalError, "locked"):
        driver_job()
    assert read_state(driver_job.run_dir) is None


def test_a_driver_job_that_is_told_to_end_knows_itself_among_the_jobs(driver_job, scontrol, tmp_path):
    """It takes its time to end; taken for another's, its watcher job would stop it, and be cancelled."""
    run_dir = driver_job.run_dir
    run_dir.path.mkdir()
    make_run_id(run_dir)
    driver, watcher = job_comment(run_dir, "driver"), job_comment(run_dir, "watcher")
    (tmp_path / "bin/squeue").write_text(
        f"#!/bin/bash\necho '17|COMPLETING|None|bob|{driver}'\necho '18|PENDING|Dependency|bob|{watcher}'\n"
    )
    (tmp_path / "bin/squeue").chmod(0o755)
    assert competing_jobs(run_dir) == []


def test_claims_go_with_the_end_of_a_chain_but_not_while_another_process_has_taken_over(driver_job, scontrol):
    stage = ToyStage(driver_job.run_dir.path.parent)
    stage.run_dir.path.mkdir()
    claim_for_run([stage], restart=False)
    meet(driver_job, ConfigError("write was begun differently", code="changed_plan"))
    with locked(driver_job.run_dir), raises(ConfigError, "changed_plan"):
        driver_job()
    assert len(list((stage.root / STAGING_NAME).glob("*.claim"))) == 2
    with raises(ConfigError, "changed_plan"):
        driver_job()
    assert not (stage.root / STAGING_NAME).exists()


@pytest.fixture
def overtaken(driver_job, scontrol, tmp_path):
    """Returns a function: jobs by number -> the driver job 17, which meets them when it has the run directory."""
    run_dir, queue = driver_job.run_dir, tmp_path / "queue"
    run_dir.path.mkdir()
    make_run_id(run_dir)
    queue.write_text("")
    for name, command in (("squeue", f"cat {queue}"), ("scancel", f'echo "scancel $@" >> {scontrol}')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{command}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def meeting(jobs):
        lines = [
            f"{number}|RUNNING|None|bob|{job_comment(run_dir, role)}\n"
            for number, role in [("17", "driver"), *jobs.items()]
        ]

        def run(executor, listener, *, restart, wait_seconds):
            queue.write_text("".join(lines))
            raise ConfigError("jobs 18 of this dataset appeared in the queue", code="jobs_in_queue")

        driver_job.dataset.run = run
        return driver_job

    return meeting


def test_a_driver_job_of_which_its_submission_never_heard_leaves_the_work_to_the_one_it_submitted_then(
    overtaken, scontrol
):
    """Taken for an error, this ended the chain and cancelled the watcher job of the one that is at work."""
    job = overtaken({"18": "driver", "19": "watcher"})
    job()
    assert read_state(job.run_dir) is None
    assert not scontrol.exists()


def test_one_that_meets_ranks_once_it_has_the_run_directory_submits_a_driver_job_behind_them(overtaken, tmp_path):
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text(f'#!/bin/bash\ncat "$1" >> {tmp_path}/scripts; echo Submitted batch job 20\n')
    sbatch.chmod(0o755)
    job = overtaken({"16_0": "rank"})
    job()
    assert read_state(job.run_dir).jobs == ["16_0", "20"]
    assert "--dependency=afterany:16" in (tmp_path / "scripts").read_text()


def test_where_the_jobs_are_gone_again_the_error_is_noted(overtaken):
    job = overtaken({})
    with raises(ConfigError, "jobs_in_queue"):
        job()
    assert read_state(job.run_dir).state == "failed"
