"""`sharmill cancel` on a real SLURM: the run ends, nothing starts it again, and the same command goes on."""

from __future__ import annotations

import pytest
from support.pipelines import run_sharmill
from support.toy_cluster import assert_same_as_local, make_profile, wait_for_units
from support.toy_stage import wait_until

from sharmill.engine.locks import lock_owner
from sharmill.engine.run_notes import read_end
from sharmill.executors.slurm.queue import queued_jobs, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_run_at_work_ends_and_goes_on_when_it_is_submitted_again(make_run, tmp_path):
    run = make_run(units=40, seconds=1.0)
    run.start()
    run.run_dir.config.touch()
    wait_for_units(run, 4)
    done = run_sharmill("cancel", str(run.run_dir.path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "ended on SLURM: jobs" in " ".join(done.stdout.split())
    assert queued_jobs(run.run_dir) == []
    assert read_end(run.run_dir).state == "cancelled"
    run.stage.mark("hurry")
    run.start()
    assert wait_for_end(run.run_dir).state == "done"
    assert_same_as_local(run, tmp_path)
    # Those that were under way are done again.
    assert run.stage.redone() <= 8


def test_an_advance_job_in_the_middle_of_a_small_stage_ends_at_once(make_run):
    """Without srun only its own handler has it end before SLURM kills it, and it would submit more until then."""
    run = make_run(units=2, seconds=600.0, profile=make_profile(driver_units=4))
    run.start()
    wait_until(lambda: run.stage.marked("begun"))
    run.run_dir.config.touch()
    assert run_sharmill("cancel", str(run.run_dir.path)).returncode == 0
    assert lock_owner(run.run_dir.path) is None
    assert "is told to end" in run.run_dir.advance_log.read_text()
    assert read_end(run.run_dir).message.startswith("cancelled by ")
