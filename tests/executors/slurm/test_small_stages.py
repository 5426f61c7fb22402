"""Small stages, which the advance job does itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack

import cloudpickle
import pytest
from support.toy_cluster import ToyDataset, ToyRun
from support.toy_stage import ToyStage, output_bytes, run, wait_until

from sharmill.encode.assemble import AssembleStage
from sharmill.engine.ledger import read_ledger
from sharmill.engine.listener import Listener
from sharmill.engine.locks import lock_owner
from sharmill.engine.outcomes import Submitted
from sharmill.engine.plan import load_plan, read_or_make_plan
from sharmill.engine.run import locked, run_stage
from sharmill.engine.run_notes import End, begin_run, note_end, read_end
from sharmill.engine.state import begin_round
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile, StageProfile, StageProfiles
from sharmill.executors.slurm.queue import job_comment, make_run_id
from sharmill.prepare.stage import PrepareStage


class GpuStage(ToyStage):
    uses_gpu = True


class InterruptedStage(ToyStage):
    """Ends the process that does it in its second unit, once."""

    def work(self, unit, staging, advance):
        if len(self.marked("attempts")) == 1:
            self.mark("attempts", "interrupted")
            raise KeyboardInterrupt
        return super().work(unit, staging, advance)


@pytest.fixture(autouse=True)
def own_cores(monkeypatch):
    """The limit of cores is one of the process."""
    monkeypatch.setattr("sharmill.engine.host._own_cores", None)


def make_executor(stage, *, is_job=True, is_second=False, **profile) -> ToyRun:
    return ToyRun(ToyDataset(stage), ClusterProfile(**profile), patience=0.2, is_job=is_job, is_second=is_second)


def submitted_call(stage, number):
    """What a job calls."""
    return cloudpickle.loads((stage.run_dir.jobs / f"{number}_submitted.pkl").read_bytes()).function


def run_on(executor: ToyRun, stage: ToyStage):
    with locked(stage.run_dir):
        return run_stage(stage, executor, Listener(), max_reject_fraction=1.0)


@pytest.mark.parametrize("is_second", [True, False])
def test_is_left_to_an_advance_job_that_waits_for_nothing(cluster, tmp_path, is_second):
    """By who submits, and by a second job, which has none behind it."""
    stage = ToyStage(tmp_path, units=4)
    submitted = run_on(make_executor(stage, is_job=is_second, is_second=is_second), stage).submitted
    assert submitted == Submitted("toy: 4 units in the advance job itself, then advance job 1", ["1"])
    # The advance job, and the one behind it.
    assert cluster.calls("sbatch") == 2
    assert [script.count("--dependency") for script in cluster.scripts()] == [0, 1]
    # They wait for the plan, which their node may see late.
    told = {"stage": "toy", "token": stage.dir.read_token(), "had_ranks": False}
    assert [submitted_call(stage, number).keywords for number in (1, 2)] == [told, told]


def test_left_over_ranks_have_an_advance_job_behind_them_that_waits_for_their_plan(cluster, tmp_path):
    stage = ToyStage(tmp_path, units=8)
    with locked(stage.run_dir):
        make_run_id(stage.run_dir)
        begin_round(stage, read_or_make_plan(stage, restart=False), 2)
    cluster.script("squeue", f"echo '7_1|RUNNING|None|(null)|bob|{job_comment(stage.run_dir, 'rank')}'")
    assert "are still in the queue, then advance job 1" in make_executor(stage, is_job=False).start().message
    assert submitted_call(stage, 1).keywords == {"stage": "toy", "token": stage.token, "had_ranks": True}


def test_has_the_bytes_of_a_local_run_and_submits_nothing(cluster, tmp_path):
    stage, local = ToyStage(tmp_path, units=4), ToyStage(tmp_path / "local", units=4)
    assert run_on(make_executor(stage), stage).ok
    assert run(local)[0].ok
    assert output_bytes(stage) == output_bytes(local)
    assert sorted(read_ledger(stage.dir, load_plan(stage))) == [0, 1, 2, 3]
    assert not cluster.was_called("sbatch")


def test_goes_on_by_ranks_when_an_advance_job_was_killed_within(cluster, tmp_path):
    stage = InterruptedStage(tmp_path, units=4)
    with pytest.raises(KeyboardInterrupt):
        run_on(make_executor(stage), stage)
    assert len(read_ledger(stage.dir, load_plan(stage))) == 1
    submitted = run_on(make_executor(stage), stage).submitted
    assert submitted.message.startswith("toy: 3 units on 3 ranks")


def after_begun(stage, does):
    """Does something in a thread while the stage's first unit, which waits for ``go``, is at work."""

    def work():
        wait_until(lambda: stage.marked("attempts"))
        does()
        stage.mark("go")

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.fixture
def at_work(cluster, tmp_path, monkeypatch):
    """An advance job under submitit, which takes no notice of SIGTERM, and its stage, which waits in its first unit."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    stage = ToyStage(tmp_path, units=3, everywhere="wait:go")
    stage.run_dir.path.mkdir()
    job = make_executor(stage)
    begin_run(stage.run_dir, job.given)
    yield job, stage
    signal.signal(signal.SIGTERM, before)


def test_ends_with_sigterm_as_by_ctrl_c(at_work):
    """Its attempt is none that failed, the lock is free, and who ended it says what becomes of the run."""
    job, stage = at_work
    thread = after_begun(stage, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        job.advance()
    thread.join()
    assert ended.value.code == 143
    assert stage.attempts().total() == 1
    assert not stage.dir.failures.exists()
    assert lock_owner(stage.run_dir.path) is None
    assert read_end(stage.run_dir) is None


def test_is_waited_for_by_a_second_process_of_its_advance_job(at_work, monkeypatch):
    """As of one requeued from a node out of reach. After ten minutes it took the first for a failure of the run."""
    job, stage = at_work
    stage.mark("go")
    now, first = [0.0], ExitStack()
    first.enter_context(locked(stage.run_dir))

    def sleep(seconds):
        now[0] += 1000.0
        if now[0] > 5000.0:
            first.close()

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    job.advance()
    assert now[0] > 5000.0
    assert read_end(stage.run_dir).state == "done"


def test_of_a_run_that_a_user_cancels_meanwhile_notes_no_other_end(at_work, cluster):
    job, stage = at_work
    cancelled = End(state="cancelled", message="cancelled by bob")
    thread = after_begun(stage, lambda: note_end(stage.run_dir, cancelled))
    job.advance()
    thread.join()
    assert read_end(stage.run_dir) == cancelled


def test_that_fails_is_tried_three_times(cluster, tmp_path):
    stage = ToyStage(tmp_path, units=4, behaviour={2: "raise"})
    result = run_on(make_executor(stage), stage)
    assert list(result.failures) == [2]
    assert [line.split()[0] for line in stage.marked("attempts")].count("2") == 3


@pytest.mark.parametrize(
    ("units", "profile", "workers"),
    [
        (4, {}, 1),
        (5, {}, 0),
        (5, {"driver_units": 5}, 1),
        (1, {"driver_units": 0}, 0),
        (4, {"driver_hours": 10.0 / 3600}, 1),
        (4, {"driver_hours": 9.0 / 3600}, 0),
        (8, {"stages": StageProfiles(driver=StageProfile(cores=2, memory_gb=8))}, 2),
        (1, {"stages": StageProfiles(driver=StageProfile(cores=2, memory_gb=8))}, 1),
        (4, {"stages": StageProfiles(driver=StageProfile(cores=2, memory_gb=7))}, 1),
        (4, {"stages": StageProfiles(driver=StageProfile(memory_gb=3.9))}, 0),
        (4, {"cpu": RankProfile(cores=2), "stages": StageProfiles(driver=StageProfile(cores=1))}, 0),
        (4, {"python": "/other/python"}, 0),
        (4, {"container_image": "image.sqsh"}, 0),
    ],
)
def test_is_what_few_units_cores_memory_and_the_same_python_make(tmp_path, units, profile, workers):
    stage = ToyStage(tmp_path, units=units)
    planned = read_or_make_plan(stage, restart=False)
    assert make_executor(stage, **profile).jobs.workers_in_job(stage, planned) == workers


def test_hours_limit_no_stage_that_counts_records(tmp_path, monkeypatch):
    stage = ToyStage(tmp_path, units=4)
    planned = read_or_make_plan(stage, restart=False)
    assert make_executor(stage, driver_hours=0.0).jobs.workers_in_job(stage, planned) == 0
    monkeypatch.setattr(ToyStage, "cost_unit", "records")
    assert make_executor(stage, driver_hours=0.0).jobs.workers_in_job(stage, planned) == 1
    assert {stage.cost_unit for stage in (PrepareStage, AssembleStage)} == {"records"}


def test_never_is_one_on_gpus(tmp_path):
    stage = GpuStage(tmp_path, units=1)
    planned = read_or_make_plan(stage, restart=False)
    assert make_executor(stage).jobs.workers_in_job(stage, planned) == 0
