"""`sharmill cancel` on a real SLURM: the chain ends, nothing starts it again, and the same command goes on."""

from __future__ import annotations

import pytest
from support.pipelines import run_sharmill
from support.toy_cluster import assert_same_as_local, make_profile, wait_for_units
from support.toy_stage import wait_until

from sharmill.engine.locks import lock_owner
from sharmill.executors.slurm.chain_state import cancel_chain, read_state, wait_for_end
from sharmill.executors.slurm.queue import queued_jobs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_chain_at_work_ends_and_goes_on_when_it_is_submitted_again(make_chain, tmp_path):
    chain = make_chain(units=40, seconds=1.0)
    chain.start()
    chain.run_dir.config.touch()
    wait_for_units(chain, 4)
    done = run_sharmill("cancel", str(chain.run_dir.path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "ended on SLURM: jobs" in " ".join(done.stdout.split())
    assert queued_jobs(chain.run_dir) == []
    assert read_state(chain.run_dir).state == "failed"
    chain.stage.mark("hurry")
    chain.start()
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    # Those that were under way are done again.
    assert chain.stage.redone() <= 8


def test_a_driver_job_in_the_middle_of_a_small_stage_ends_at_once(make_chain):
    """Without srun only its own handler has it end before SLURM kills it, and it would submit more until then."""
    chain = make_chain(units=2, seconds=600.0, profile=make_profile(driver_units=4))
    chain.start()
    wait_until(lambda: chain.stage.marked("begun"))
    cancel_chain(chain.run_dir)
    assert lock_owner(chain.run_dir.path) is None
    assert "is told to end" in chain.run_dir.chain_log.read_text()
    assert read_state(chain.run_dir).message.startswith("cancelled by ")
