"""Ranks on a real SLURM whose GPU breaks: they leave, are requeued, and go on."""

from __future__ import annotations

import pytest
from support.gpu_faults import BreakingStage
from support.toy_cluster import ToyChain, ToyDataset, cancel_all, make_profile
from support.toy_stage import output_bytes, run

from sharmill.executors.slurm.chain import wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def finish():
    """Returns a function: a stage -> the state in which its chain ends, on one rank."""
    chains = []

    def finish(stage):
        chains.append(ToyChain(ToyDataset(stage), make_profile(max_ranks=1)))
        chains[-1].start()
        return wait_for_end(chains[-1])

    yield finish
    for chain in chains:
        cancel_all(chain.run_dir)


def test_a_rank_whose_context_breaks_leaves_uncounted_and_is_requeued(tmp_path, finish):
    stage = BreakingStage(tmp_path, once=(2,))
    state = finish(stage)
    assert state.state == "done"
    assert stage.attempts() == {0: 1, 1: 1, 2: 2, 3: 1, 4: 1, 5: 1}
    assert len(stage.pids()) == 2
    # By SLURM, within the same job, and not by a later driver job.
    assert "leaves, since its device works no more" in stage.dir.rank_log(0).read_text()
    local = BreakingStage(tmp_path / "local")
    run(local)
    assert output_bytes(stage) == output_bytes(local)


def test_a_rank_that_cannot_be_set_up_is_named_at_the_end(tmp_path, finish):
    stage = BreakingStage(tmp_path, units=2, setup_does="raise_once:no such GPU")
    state = finish(stage)
    assert state.state == "done"
    assert "ValueError: no such GPU" in state.message
