"""Ranks on a real SLURM whose GPU fails in every way: they leave, are requeued or submitted again, and go on."""

from __future__ import annotations

import pytest
from support.gpu_faults import FULL, FaultyStage, FullStage
from support.toy_cluster import ToyDataset, ToyRun, cancel_all, make_profile

from sharmill.executors.slurm.queue import wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def finish():
    """Returns a function: a stage -> the state in which its run ends, on one rank."""
    runs = []

    def finish(stage):
        runs.append(ToyRun(ToyDataset(stage), make_profile(max_ranks=1)))
        runs[-1].start()
        return wait_for_end(runs[-1].run_dir)

    yield finish
    for run in runs:
        cancel_all(run.run_dir)


def test_every_fault_costs_one_attempt_and_a_broken_context_none(tmp_path, finish):
    stage = FaultyStage(tmp_path)
    state = finish(stage)
    assert state.state == "done", state.message
    stage.assert_done(tmp_path / "clean")
    # After the broken context and the dead GPU: in the same job.
    log = stage.dir.rank_log(0).read_text()
    assert "makes way for a fresh process" in log
    assert "CUDA error: all CUDA-capable devices are busy or unavailable" in log


def test_where_nothing_fits_the_stage_ends_at_its_second_unit(tmp_path, finish):
    stage = FullStage(tmp_path)
    state = finish(stage)
    assert state.state == "failed"
    assert FULL in state.message
    assert stage.attempts().total() == 2
