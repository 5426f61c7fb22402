"""Small stages, which the advance job does itself."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from support.toy_cluster import ToyDataset, ToyRun
from support.toy_stage import GpuStage, ToyStage, output_bytes, run, wait_until

from sharmill.encode.assemble import AssembleStage
from sharmill.engine.outcomes import Submitted
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.run_notes import Given, begin_run, read_end
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.files.locks import lock_owner
from sharmill.prepare.stage import PrepareStage


@pytest.fixture(autouse=True)
def own_cores(monkeypatch):
    """The limit of cores is one of the process."""
    monkeypatch.setattr("sharmill.files.host._own_cores", None)


@pytest.fixture
def make_job(cluster, monkeypatch):
    """Returns a function: a stage -> the advance job 17 of its run."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")

    def make(stage, role="advance"):
        given = Given(stages=["toy"], cluster="here")
        job = ToyRun(ToyDataset(stage), ClusterProfile(), patience=0.2, role=role, given=given)
        stage.run_dir.path.mkdir()
        begin_run(stage.run_dir, given)
        return job

    return make


@pytest.mark.parametrize("role", [None, "second"])
def test_is_left_to_an_advance_job_that_waits_for_nothing(cluster, tmp_path, make_job, role):
    """By who submits, and by a second job, which has none behind it."""
    stage = ToyStage(tmp_path, units=4)
    message = "toy: 4 units in the advance job itself, then advance job 1"
    if role is None:
        assert ToyRun(ToyDataset(stage), ClusterProfile(), patience=0.2).start() == Submitted(message, ["1"])
    else:
        job = make_job(stage, role)
        job.advance("toy", "", False)
        assert message in job.run_dir.advance_log.read_text()
    # The advance job, and the one behind it.
    assert [script.count("--dependency") for script in cluster.scripts()] == [0, 1]


def test_has_the_bytes_of_a_local_run_and_submits_nothing(cluster, tmp_path, make_job):
    stage, local = ToyStage(tmp_path, units=4), ToyStage(tmp_path / "local", units=4)
    make_job(stage).advance("toy", "", False)
    assert run(local)[0].ok
    assert output_bytes(stage) == output_bytes(local)
    assert read_end(stage.run_dir).state == "done"
    assert not cluster.was_called("sbatch")


def test_ends_with_sigterm_as_by_ctrl_c(tmp_path, make_job):
    """Its attempt is none that failed, the lock is free, and who ended it says what becomes of the run."""
    # Submitit takes no notice of the signal.
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    stage = ToyStage(tmp_path, units=3, everywhere="wait:go")
    job = make_job(stage)

    def end_once_begun():
        wait_until(lambda: stage.marked("attempts"))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end_once_begun)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        job.advance("toy", "", False)
    thread.join()
    signal.signal(signal.SIGTERM, before)
    assert stage.attempts().total() == 1
    assert not stage.dir.failures.exists()
    assert lock_owner(stage.run_dir.path) is None
    assert read_end(stage.run_dir) is None


@pytest.mark.parametrize(
    ("units", "profile", "workers"),
    [
        (4, {}, 1),
        (5, {}, 0),
        (5, {"driver_units": 5}, 1),
        (1, {"driver_units": 0}, 0),
        (4, {"driver_hours": 10.0 / 3600}, 1),
        (4, {"driver_hours": 9.0 / 3600}, 0),
        (8, {"stages": {"driver": {"cores": 2, "memory_gb": 8}}}, 2),
        (1, {"stages": {"driver": {"cores": 2, "memory_gb": 8}}}, 1),
        (4, {"stages": {"driver": {"cores": 2, "memory_gb": 7}}}, 1),
        (4, {"stages": {"driver": {"memory_gb": 3.9}}}, 0),
        (4, {"cpu": RankProfile(cores=2), "stages": {"driver": {"cores": 1}}}, 0),
        (4, {"python": "/other/python"}, 0),
        (4, {"container_image": "image.sqsh"}, 0),
    ],
)
def test_is_what_few_units_cores_memory_and_the_same_python_make(tmp_path, units, profile, workers):
    stage = ToyStage(tmp_path, units=units)
    run = ToyRun(ToyDataset(stage), ClusterProfile(**profile))
    planned = read_or_make_plan(stage, restart=False)
    assert run.workers_in_job(stage, planned) == workers
    assert run.workers_in_job(GpuStage(tmp_path), planned) == 0


def test_hours_limit_no_stage_that_counts_records(tmp_path, monkeypatch):
    stage = ToyStage(tmp_path, units=4)
    monkeypatch.setattr(ToyStage, "cost_unit", "records")
    run = ToyRun(ToyDataset(stage), ClusterProfile(driver_hours=0.0))
    assert run.workers_in_job(stage, read_or_make_plan(stage, restart=False)) == 1
    assert {stage.cost_unit for stage in (PrepareStage, AssembleStage)} == {"records"}
