"""Advance jobs where the cluster is a few scripts: the wait for a controller that is away, and the note of an end."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.errors import raises
from support.toy_cluster import ToyDataset, ToyRun
from support.toy_stage import ToyStage

from sharmill.engine.fence import claim_for_run
from sharmill.engine.run import describe_end, locked
from sharmill.engine.run_notes import End, Given, begin_run, note_end, read_end
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm import queue as slurm_queue
from sharmill.executors.slurm.executor import SlurmExecutor
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.executors.slurm.queue import SlurmSilent, competing_jobs, job_comment, make_run_id
from sharmill.staging import STAGING_NAME


@pytest.fixture
def job(cluster, tmp_path, monkeypatch):
    """The advance job 17 of a run without stages; ``scontrol requeue`` notes its orders."""
    cluster.script("scontrol", 'echo "$@" >> orders')
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    (tmp_path / "run").mkdir()
    dataset = SimpleNamespace(
        name="toy", run_dir=tmp_path / "run", make_stages=list, show=lambda: None, ranks_of_use=None
    )
    dataset.run = lambda executor, listener, **options: SimpleNamespace(stages=[], end=lambda: describe_end([]))
    job = SlurmExecutor(dataset, ClusterProfile(), "sharmill submit all c.yaml", cluster="here", is_job=True)
    begin_run(job.run_dir, job.given)
    return job


def meet(job, error):
    """Have the stages of a job end with an error."""

    def run(executor, listener, *, restart, wait_seconds):
        raise error

    job.dataset.run = run


def test_one_that_has_waited_as_long_as_it_may_is_requeued(job, cluster):
    meet(job, SlurmSilent("SLURM does not answer squeue"))
    replace(job, patience=0.0).advance()
    assert (cluster.folder / "orders").read_text() == "requeue 17\n"
    assert read_end(job.run_dir) is None


@pytest.mark.parametrize(
    ("error", "restarts", "seconds"),
    [
        # For the 240th time: twelve hours.
        (SlurmSilent("SLURM does not answer"), "239", 200.0),
        # At once: it is not the wait that ends it.
        (FatalError("Invalid qos specification", code="jobs_refused"), "0", 1.0),
        (FatalError("the disk is full", code="disk"), "0", 200.0),
    ],
)
def test_what_will_not_pass_ends_the_run(job, cluster, monkeypatch, error, restarts, seconds):
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    monkeypatch.setattr(time, "monotonic", iter([0.0, 0.0] + 1000 * [seconds]).__next__)
    meet(job, error)
    with raises(type(error), error.code):
        replace(job, patience=180.0).advance()
    assert not (cluster.folder / "orders").exists()
    assert (read_end(job.run_dir).state, read_end(job.run_dir).code) == ("failed", error.code)


@pytest.mark.parametrize("is_second", [False, True])
def test_only_the_second_job_notes_an_error_that_may_pass_where_it_cannot_be_requeued(
    job, cluster, monkeypatch, is_second
):
    cluster.script("scontrol", "", fails=99, says="Unable to contact slurm controller")
    monkeypatch.setattr(slurm_queue, "PATIENCE_SECONDS", 0.1)
    meet(job, SlurmSilent("SLURM does not answer squeue"))
    with raises(SlurmSilent, "silent_cluster"):
        replace(job, patience=0.0, is_second=is_second).advance()
    assert (read_end(job.run_dir) is not None) == is_second


@pytest.mark.parametrize("state", ["done", "failed"])
def test_the_command_of_the_profile_is_told_of_the_end(job, tmp_path, state):
    said = tmp_path / "said"
    command = f'cat > {said}; echo "$SHARMILL_NAME $SHARMILL_STATE $SHARMILL_FINDINGS $SHARMILL_RUN_DIR" >> {said}'
    job.profile = replace(job.profile, notify=command)
    message = "there is no stage to run" if state == "done" else 'it\'s "over" $(touch no)'
    if state == "failed":
        meet(job, FatalError(message, code="disk"))
    with nullcontext() if state == "done" else raises(FatalError, "disk"):
        job.advance()
    assert said.read_text() == f"{message}\ntoy {state} 0 {job.run_dir.path}\n"


@pytest.mark.parametrize("command", ["echo no such user >&2; exit 3", "printf 'no such user \\xff' >&2; exit 3"])
def test_a_command_that_fails_changes_nothing(job, command):
    job.profile = replace(job.profile, notify=command)
    job.advance()
    assert read_end(job.run_dir).state == "done"
    assert "no such user" in job.run_dir.advance_log.read_text()


def test_one_that_another_process_has_put_out_of_the_run_directory_leaves_the_run_to_that(job):
    """It noted a failure, and cancelled the second job of the one at work."""
    meet(job, FatalError("another process took the lock over", code="locked"))
    with raises(FatalError, "locked"):
        job.advance()
    assert read_end(job.run_dir) is None


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_of_a_run_that_was_cancelled_or_taken_over_does_and_notes_nothing(job, is_cancelled):
    meet(job, AssertionError("it goes on"))
    if is_cancelled:
        note_end(job.run_dir, End(state="cancelled", message="cancelled by bob"))
    else:
        begin_run(job.run_dir, Given(stages=[]))
    before = read_end(job.run_dir)
    job.advance()
    assert read_end(job.run_dir) == before
    assert "the run has ended, or another one has begun in its place" in job.run_dir.advance_log.read_text()


def test_one_that_is_told_to_end_knows_itself_among_the_jobs(job, cluster):
    """It takes its time to end; taken for another's, the job behind it would stop it, and be cancelled."""
    make_run_id(job.run_dir)
    advance, second = job_comment(job.run_dir, "advance"), job_comment(job.run_dir, "second")
    cluster.script(
        "squeue",
        f"echo '17|COMPLETING|None|(null)|bob|{advance}'; echo '18|PENDING|Dependency|afternotok:17|bob|{second}'",
    )
    assert competing_jobs(job.run_dir) == []


def test_claims_go_with_the_end_of_a_run_but_not_while_another_process_has_taken_over(job):
    stage = ToyStage(job.run_dir.path.parent)
    claim_for_run([stage], restart=False)
    meet(job, ConfigError("write was begun differently", code="changed_plan"))
    with locked(job.run_dir), raises(ConfigError, "changed_plan"):
        job.advance()
    assert len(list((stage.root / STAGING_NAME).glob("*.claim"))) == 2
    begin_run(job.run_dir, job.given)
    with raises(ConfigError, "changed_plan"):
        job.advance()
    assert not (stage.root / STAGING_NAME).exists()


def test_a_submission_that_fails_notes_its_end_if_it_had_begun(cluster, tmp_path):
    run = ToyRun(ToyDataset(ToyStage(tmp_path, units=8)), ClusterProfile())
    cluster.script("sbatch", "", fails=99, says="Invalid qos specification")
    with raises(FatalError, "jobs_refused"):
        run.start()
    assert (read_end(run.run_dir).state, read_end(run.run_dir).code) == ("failed", "jobs_refused")
    begin_run(run.run_dir, run.given)
    with locked(run.run_dir), raises(ConfigError, "locked"):
        run.start()
    assert read_end(run.run_dir) is None


@pytest.mark.parametrize(
    ("role", "says", "behind"),
    [("rank", "jobs 16_0 (user bob) are still in the queue, then advance job 1", ["--dependency=afterany:16"]),
     ("advance", "jobs 18 (user bob) are still in the queue", [])],
)  # fmt: skip
def test_one_that_meets_ranks_submits_the_next_behind_them_and_one_that_meets_the_next_leaves_the_work_to_that(
    cluster, tmp_path, monkeypatch, role, says, behind
):
    """One was requeued after it had submitted, of the other the submission never heard."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    run = ToyRun(ToyDataset(ToyStage(tmp_path, units=8)), ClusterProfile(), cluster="here", is_job=True)
    with locked(run.run_dir):
        make_run_id(run.run_dir)
        begin_run(run.run_dir, run.given)
    number = "16_0" if role == "rank" else "18"
    cluster.script(
        "squeue",
        f"echo '17|RUNNING|None|(null)|bob|{job_comment(run.run_dir, 'advance')}'; "
        f"echo '{number}|RUNNING|None|(null)|bob|{job_comment(run.run_dir, role)}'",
    )
    run.advance()
    assert says in run.run_dir.advance_log.read_text()
    scripts = cluster.scripts()
    assert len(scripts) == 2 * len(behind)
    assert all(line in scripts[0] for line in behind)
    assert read_end(run.run_dir) is None
