"""Ranks of an array that share their units among themselves, without a cluster."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
from support.toy_cluster import SleepyStage
from support.toy_stage import output_bytes, run, wait_until

from sharmill.engine.attempts import AttemptLog, Attempts
from sharmill.engine.fence import make_fence
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan, read_or_make_plan
from sharmill.engine.rejects import RejectLimit
from sharmill.executors.slurm import taken_units
from sharmill.executors.slurm import task as rank_task
from sharmill.executors.slurm.taken_units import UnitsToDo
from sharmill.executors.slurm.task import RankTask

fork = multiprocessing.get_context("fork")


def make_stage(folder, units, **options):
    stage = SleepyStage(folder, units=units, **options)
    read_or_make_plan(stage, restart=False)
    make_fence(stage)
    return stage


def make_task(stage, rank, units):
    rejects = RejectLimit(stage.name, stage.dir.path / "rejects", 1000, 1.0)
    return RankTask(stage, rank, units, "cpu", rejects)


def take(stage, unit, rank, *, seconds_ago=0.0):
    path = stage.dir.taken / str(unit)
    path.write_text(str(rank))
    os.utime(path, (time.time() - seconds_ago,) * 2)


def done(stage):
    return sorted(read_ledger(stage.dir, load_plan(stage)))


def published(stage):
    return {name: data for name, data in output_bytes(stage).items() if name.startswith(stage.folders)}


@pytest.fixture
def soon(monkeypatch):
    """Units are late at once, and ranks look for them without a pause."""
    monkeypatch.setattr(taken_units, "_LEAST_SECONDS", 30.0)
    monkeypatch.setattr(taken_units, "_SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(taken_units, "_LOOKING_SHARE", 0.0)
    monkeypatch.setattr(rank_task, "_SECONDS_BETWEEN_LOOKS", 0.05)


def test_a_rank_goes_on_with_units_that_no_rank_has_begun_the_largest_first(tmp_path):
    stage = make_stage(tmp_path, 5)
    take(stage, 3, rank=1)
    take(stage, "watch", rank=1)
    assert make_task(stage, 0, [0])() == 1
    assert list(stage.begun()) == [0, 2, 1, 4]
    assert done(stage) == [0, 1, 2, 4]


def test_units_that_another_rank_has_taken_are_not_begun_by_the_rank_whose_they_were(tmp_path):
    stage = make_stage(tmp_path, 3)
    take(stage, 1, rank=7)
    take(stage, "watch", rank=7)
    assert make_task(stage, 0, [0, 1, 2])() == 2
    assert 1 not in stage.begun()


def test_a_rank_that_was_requeued_goes_on_with_what_it_had_taken(tmp_path):
    stage = make_stage(tmp_path, 3)
    take(stage, 2, rank=0)
    make_task(stage, 0, [0, 1])()
    assert done(stage) == [0, 1, 2]


@pytest.mark.parametrize("own", [[0, 1], [0]])
def test_a_rank_that_was_requeued_leaves_what_another_has_begun_once_more(tmp_path, own):
    stage = make_stage(tmp_path, 2)
    take(stage, 1, rank=0)
    take(stage, "1-again", rank=4)
    take(stage, "watch", rank=4)
    make_task(stage, 0, own)()
    assert done(stage) == [0]


def test_where_nothing_is_left_no_model_is_loaded(tmp_path):
    stage = make_stage(tmp_path, 2)
    take(stage, 0, rank=1)
    take(stage, 1, rank=1)
    assert make_task(stage, 0, [0])() == 0
    assert stage.marked("setup") == []


def test_units_that_were_given_up_are_not_taken(tmp_path):
    stage = make_stage(tmp_path, 2)
    log = AttemptLog(stage.dir.attempts)
    for _ in range(3):
        log.begin(1)
    make_task(stage, 0, [0])()
    assert done(stage) == [0]


def test_a_unit_that_fails_is_tried_three_times_by_the_rank_that_took_it(tmp_path):
    stage = make_stage(tmp_path, 3, behaviour={2: "raise:no such voice"})
    make_task(stage, 0, [0])()
    assert done(stage) == [0, 1]
    assert stage.begun()[2] == 3
    assert "no such voice" in Attempts(stage.dir.attempts).errors[2].message


@pytest.mark.usefixtures("soon")
def test_of_ranks_at_once_each_begins_other_units_and_all_are_done_with_the_same_bytes(tmp_path):
    stage = make_stage(tmp_path / "shared", 24, seconds=0.02)
    ranks = [fork.Process(target=make_task(stage, rank, [rank])) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert done(stage) == list(range(24))
    assert stage.redone() == 0
    alone = SleepyStage(tmp_path / "alone", units=24)
    run(alone)
    assert published(stage) == published(alone)


@pytest.mark.usefixtures("soon")
def test_a_unit_that_is_late_on_another_rank_is_begun_once_more_and_only_once(tmp_path):
    stage = make_stage(tmp_path, 3)
    take(stage, 1, rank=1, seconds_ago=100)
    take(stage, 2, rank=2, seconds_ago=100)
    (stage.dir.taken / "2-again").write_text("3")
    make_task(stage, 0, [0])()
    assert done(stage) == [0, 1]
    assert (stage.dir.taken / "1-done").exists()
    assert not (stage.dir.taken / "2-done").exists()


@pytest.mark.usefixtures("soon")
def test_one_rank_alone_waits_for_units_that_are_late(tmp_path):
    stage = make_stage(tmp_path, 2)
    take(stage, 1, rank=1, seconds_ago=100)
    take(stage, "watch", rank=2)
    make_task(stage, 0, [0])()
    assert done(stage) == [0]


def start(stage, rank, units):
    process = fork.Process(target=make_task(stage, rank, units))
    process.start()
    return process


@pytest.mark.usefixtures("soon")
def test_a_rank_waits_until_the_units_of_others_are_done(tmp_path):
    stage = make_stage(tmp_path, 2, behaviour={1: "wait:go"})
    slow = start(stage, 1, [1])
    wait_until(lambda: stage.begun()[1] == 1)
    quick = start(stage, 0, [0])
    wait_until(lambda: done(stage) == [0] and (stage.dir.taken / "watch").exists())
    quick.join(0.5)
    assert quick.is_alive()
    stage.mark("go")
    slow.join()
    quick.join()
    assert (slow.exitcode, quick.exitcode) == (0, 0)
    assert done(stage) == [0, 1]
    assert stage.redone() == 0


@pytest.mark.usefixtures("soon")
def test_a_rank_that_waited_and_was_requeued_goes_on_waiting_and_with_what_it_had_begun_again(tmp_path):
    stage = make_stage(tmp_path, 3)
    make_task(stage, 1, [0])  # nothing is done yet
    take(stage, 1, rank=5, seconds_ago=100)
    take(stage, 2, rank=5, seconds_ago=100)
    take(stage, "1-again", rank=0)
    take(stage, "watch", rank=0)
    assert make_task(stage, 3, [0])() == 1
    assert done(stage) == [0]
    assert make_task(stage, 0, [])() == 0
    assert done(stage) == [0, 1, 2]


@pytest.mark.usefixtures("soon")
def test_the_rank_that_began_a_unit_once_more_does_not_leave_when_the_slow_one_ends_it_first(tmp_path):
    stage = make_stage(tmp_path, 3, behaviour={1: "wait:go"})
    take(stage, 1, rank=1, seconds_ago=100)
    take(stage, 2, rank=2, seconds_ago=90)
    again = start(stage, 0, [0])
    wait_until(lambda: stage.begun()[1] == 1)
    slow = UnitsToDo(stage, stage.dir.taken, 1, [], lambda: False)
    slow.done(load_plan(stage)[1])
    stage.mark("go")
    again.join()
    assert again.exitcode == 0
    assert done(stage) == [0, 1, 2]


def test_tasks_that_wait_in_the_queue_end_when_nothing_is_left(tmp_path, monkeypatch):
    cancelled = []
    monkeypatch.setattr(rank_task, "cancel_pending", cancelled.append)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "71")
    stage = make_stage(tmp_path, 2, behaviour={1: "raise"})
    take(stage, 1, rank=1)
    take(stage, "watch", rank=1)
    make_task(stage, 0, [0])()
    assert cancelled == []
    make_task(stage, 1, [1])()
    assert done(stage) == [0]
    assert cancelled == ["71"]


@pytest.mark.usefixtures("soon")
def test_a_rank_that_hangs_in_a_unit_leaves_once_another_has_done_it(tmp_path):
    stage = make_stage(tmp_path, 1, seconds=600)
    hanging = fork.Process(target=make_task(stage, 1, [0]))
    hanging.start()
    wait_until(lambda: stage.begun()[0] == 1)
    (stage.dir.taken / "0-again").write_text("0")
    (stage.dir.taken / "0-done").write_text("0")
    hanging.join(60)
    assert hanging.exitcode == 0
    # The attempt does not count: nothing was wrong with the unit.
    assert Attempts(stage.dir.attempts).counts[0] == 0


def test_where_kinds_of_device_are_mixed_the_rank_that_comes_first_publishes(tmp_path):
    stage = make_stage(tmp_path, 2)
    stage.mixed_devices = True
    (stage.dir.taken / "1-published").write_text("5")
    make_task(stage, 0, [0, 1])()
    assert done(stage) == [0]
    assert len(published(stage)) == 2
    assert Attempts(stage.dir.attempts).counts[1] == 0
    assert Attempts(stage.dir.attempts).interruptions[1] == 1


def test_a_later_process_of_the_same_rank_does_not_publish_for_the_one_before(tmp_path):
    stage = make_stage(tmp_path, 2)
    stage.mixed_devices = True
    before, after = (UnitsToDo(stage, stage.dir.taken, 0, [], lambda: False) for _ in range(2))
    unit = load_plan(stage)[0]
    assert (before.may_publish(unit), before.may_publish(unit), after.may_publish(unit)) == (True, True, False)
