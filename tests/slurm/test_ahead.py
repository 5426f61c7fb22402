"""Jobs of later stages that are submitted ahead."""

from __future__ import annotations

import pytest
from support.toy_cluster import LastStage, MiddleStage, MortalStage, assert_same_as_local, make_profile
from support.toy_stage import output_bytes, wait_until

from sharmill.executors.slurm.chain_state import cancel_chain, wait_for_end
from sharmill.executors.slurm.queue import queued_jobs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_stages_submitted_ahead_are_done_by_the_jobs_that_waited(make_chain, tmp_path):
    """The driver job does the second stage itself, and of the ranks of the third two are enough."""
    later = (MiddleStage(tmp_path, units=1), LastStage(tmp_path, units=2))
    chain = make_chain(units=6, later=later, profile=make_profile(max_ranks=3, driver_units=1, submit_ahead=True))
    chain.start()
    chain.submit_ahead()
    waiting = [(job.ahead, job.role) for job in queued_jobs(chain.run_dir) if job.ahead]
    of_stage = ["driver", "rank", "rank", "rank", "watcher"]
    assert sorted(waiting) == [(stage, role) for stage in ("last", "middle") for role in of_stage]
    assert wait_for_end(chain.run_dir).state == "done"
    assert_same_as_local(chain, tmp_path)
    assert [stage.redone() for stage in later] == [0, 0]
    assert [len(output_bytes(stage)) for stage in later] == [3, 5]
    assert len(list(chain.run_dir.jobs.glob("*_submission.sh"))) == 9
    assert len(list(chain.run_dir.jobs.glob("*_work.pkl"))) == 3
    assert queued_jobs(chain.run_dir) == []


def test_a_driver_job_that_is_killed_takes_what_waits_for_it_along(make_chain, tmp_path):
    later = (LastStage(tmp_path, units=2),)
    profile = make_profile(max_ranks=2, submit_ahead=True)
    chain = make_chain(units=2, kind=MortalStage, later=later, profile=profile)
    chain.stage.mark("ends", "kill")
    chain.start()
    chain.submit_ahead()
    ahead = {job.number for job in queued_jobs(chain.run_dir) if job.ahead}
    assert wait_for_end(chain.run_dir).state == "done"
    assert [chain.stage.redone(), later[0].redone()] == [0, 0]
    # The watcher job submits others.
    assert not any(chain.run_dir.job_work(number).exists() for number in ahead)
    assert queued_jobs(chain.run_dir) == []


def test_cancel_ends_what_was_submitted_ahead_too(make_chain, tmp_path):
    chain = make_chain(
        units=2, everywhere="wait:go", later=(LastStage(tmp_path, units=2),), profile=make_profile(submit_ahead=True)
    )
    chain.start()
    chain.submit_ahead()
    wait_until(lambda: chain.stage.begun(), 60)
    assert len(cancel_chain(chain.run_dir)) == 6
    assert queued_jobs(chain.run_dir) == []
