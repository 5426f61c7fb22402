"""Advance jobs where the cluster is a few scripts: the wait for a controller that is away, and the note of an end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.errors import raises
from support.toy_cluster import ToyDataset, ToyRun
from support.toy_stage import ToyStage

from sharmill.engine.reservations import make_run_id, reserve
from sharmill.engine.run import locked
from sharmill.engine.run_notes import End, Given, begin_run, note_end, read_end
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm.executor import SlurmExecutor
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.executors.slurm.queue import SlurmSilent, job_comment
from sharmill.files.staging import STAGING_NAME

# As in a job, which submitit starts: importing it closes log files.
pytest.importorskip("submitit")
SILENT = SlurmSilent("SLURM does not answer squeue")


@pytest.fixture
def job(cluster, tmp_path, monkeypatch):
    """The advance job 17 of a run, all of whose stages are done; ``scontrol requeue`` notes its orders."""
    cluster.script("scontrol", 'echo "$@" >> orders')
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    (tmp_path / "run").mkdir()
    dataset = SimpleNamespace(name="toy", run_dir=tmp_path / "run", make_stages=lambda: [ToyStage(tmp_path)])
    dataset.run = lambda executor, **options: End(state="done", message="all stages are done")
    dataset.show = lambda: None
    job = SlurmExecutor(dataset, ClusterProfile(), role="advance", given=Given(stages=["toy"], cluster="here"))
    begin_run(job.run_dir, job.given)
    return job


def advance(job, error=None, *, raised=None):
    """Run a job whose stages end with an error, if one is given; return the end of the run that is noted then."""

    def fail(executor, **options):
        raise error

    if error is not None:
        job.dataset.run = fail
    with suppress(type(error)) if raised is None else raises(type(error), raised):
        job.advance("toy", "0" * 16, False)
    return read_end(job.run_dir)


def test_one_that_has_waited_as_long_as_it_may_is_requeued(job, cluster):
    assert advance(job, SILENT) is None
    assert (cluster.folder / "orders").read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    ("error", "restarts"),
    [
        # For the 240th time: twelve hours.
        (SILENT, "239"),
        (FatalError("Invalid qos specification", code="jobs_refused"), "0"),
        (FatalError("the disk is full", code="disk"), "0"),
        (RuntimeError("nobody thought of this"), "0"),
    ],
)
def test_what_will_not_pass_ends_the_run_at_the_latest_in_the_second_job(job, cluster, monkeypatch, error, restarts):
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    end = advance(replace(job, patience=180.0, role="second"), error, raised=getattr(error, "code", None))
    assert not (cluster.folder / "orders").exists()
    assert (end.state, end.code) == ("failed", getattr(error, "code", ""))


def test_what_may_pass_is_left_to_the_second_job_where_slurm_does_not_requeue(job, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "9999")
    assert advance(job, SILENT, raised="silent_cluster") is None


@pytest.mark.parametrize("state", ["done", "failed"])
def test_the_command_of_the_profile_is_told_of_the_end(job, tmp_path, state):
    said = tmp_path / "said"
    command = f'cat > {said}; echo "$SHARMILL_NAME $SHARMILL_STATE $SHARMILL_FINDINGS $SHARMILL_RUN_DIR" >> {said}'
    # That it fails changes nothing.
    job.profile = replace(job.profile, notify=f"{command}; printf 'no such user \\xff' >&2; exit 3")
    message = "all stages are done" if state == "done" else 'it\'s "over" $(touch no)'
    assert advance(job, None if state == "done" else FatalError(message, code="disk")).state == state
    assert said.read_text() == f"{message}\ntoy {state} 0 {job.run_dir.path}\n"
    assert "no such user" in job.run_dir.advance_log.read_text()


def test_one_that_another_process_has_put_out_of_the_run_directory_leaves_the_run_to_that(job):
    taken = FatalError("another process took the lock over", code="locked")
    assert advance(replace(job, role="second"), taken, raised="locked") is None


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_of_a_run_that_was_cancelled_or_taken_over_does_and_notes_nothing(job, is_cancelled):
    if is_cancelled:
        note_end(job.run_dir, End(state="cancelled", message="cancelled by bob"))
    else:
        begin_run(job.run_dir, Given(stages=[]))
    before = read_end(job.run_dir)
    assert advance(job, AssertionError("it goes on")) == before
    assert "the run has ended, or another one has begun in its place" in job.run_dir.advance_log.read_text()


def test_reservations_go_with_the_end_of_a_run_but_not_while_another_process_has_taken_over(job):
    stage = ToyStage(job.run_dir.path.parent)
    reserve([stage], restart=False)
    job.dataset.make_stages = lambda: [stage]
    error = ConfigError("write was begun differently", code="changed_plan")
    with locked(job.run_dir):
        assert advance(job, error).code == "changed_plan"
    assert len(list((stage.root / STAGING_NAME).glob("*.reservation"))) == 2
    begin_run(job.run_dir, job.given)
    advance(job, error)
    assert not (stage.root / STAGING_NAME).exists()


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
    given = Given(stages=["toy"], cluster="here")
    run = ToyRun(ToyDataset(ToyStage(tmp_path, units=8)), ClusterProfile(), role="advance", given=given)
    with locked(run.run_dir):
        make_run_id(run.run_dir)
        run.run_dir.jobs.mkdir()
        begin_run(run.run_dir, given)
    number = "16_0" if role == "rank" else "18"
    cluster.script(
        "squeue",
        f"echo '17|RUNNING|None|(null)|bob|{job_comment(run.run_dir, 'advance')}'; "
        f"echo '{number}|RUNNING|None|(null)|bob|{job_comment(run.run_dir, role)}'",
    )
    assert advance(run) is None
    assert says in run.run_dir.advance_log.read_text()
    scripts = cluster.scripts()
    assert len(scripts) == 2 * len(behind)
    assert all(line in scripts[0] for line in behind)
