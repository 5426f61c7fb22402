"""Attempts at units and answers of ranks, as every driver counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.errors import raises
from support.toy_stage import RecordingListener, ToyStage

from sharmill.engine.outcomes import FailedAttempt
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.unit import Commit, make_unit
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.driven_rank import DrivenRank, FailedStarts, Ready, as_answer
from sharmill.executors.unit_queue import UnitQueue


@pytest.fixture
def heard():
    return RecordingListener()


@pytest.fixture
def queue(heard):
    """Two units; unit 1 costs more."""
    units = [make_unit(index, cost=float(index), size=1, params={}) for index in range(2)]
    return UnitQueue(units, RejectLimit("toy", Path("rejects"), expected_in=2, max_fraction=0.4), heard)


def commit_of(unit):
    return Commit(
        token="", index=unit.index, id=unit.id, files=[], num_in=1, num_out=1, rejects={}, stats={}, seconds=0.1, rank=0
    )


def error_of(unit):
    return FailedAttempt(unit.index, "ValueError: no", "Traceback")


def test_the_third_failure_of_a_unit_is_its_last(queue, heard):
    unit = queue.take()
    for _ in range(2):
        queue.failed(unit, error_of(unit))
        assert [queue.take().index for _ in range(len(queue))][-1] == 1
        assert heard.failed == {}
    queue.failed(unit, error_of(unit))
    assert len(queue) == 0
    assert heard.failed == {1: (error_of(unit), 3)}
    assert queue.failures == {1: error_of(unit)}


def test_an_interrupted_unit_waits_last_in_line_and_keeps_its_attempts(queue):
    unit = queue.take()
    for _ in range(10):
        queue.interrupted(unit, error_of(unit))
        assert [queue.take().index, queue.take().index, queue.take()] == [0, 1, None]
        queue.interrupted(make_unit(0, cost=0.0, size=1, params={}), error_of(unit))
    queue.failed(unit, error_of(unit))
    queue.failed(unit, error_of(unit))
    assert queue.failures == {}


def test_a_unit_that_takes_its_node_down_each_time_comes_to_an_end(queue):
    queue.take()
    unit = queue.take()
    count = 0
    while not queue.failures:
        queue.interrupted(unit, error_of(unit))
        count += 1
        assert count < 100
    assert count == 13


def test_a_rank_takes_commits_and_errors_for_its_unit(queue, heard):
    rank = DrivenRank(number=0)
    rank.handle_answer(Ready(), queue)
    assert rank.ready
    rank.unit = queue.take()
    rank.handle_answer(commit_of(rank.unit), queue)
    assert rank.unit is None
    assert heard.done == [1]
    rank.unit = queue.take()
    rank.handle_answer(error_of(rank.unit), queue)
    assert rank.unit is None
    assert len(queue) == 1


def test_a_rank_goes_after_two_failures_in_a_row(queue):
    rank = DrivenRank(number=0)
    seen = []
    for answer in (error_of, commit_of, error_of, error_of):
        rank.unit = make_unit(0, cost=0.0, size=1, params={})
        rank.handle_answer(answer(rank.unit), queue)
        seen.append(rank.needs_replacing())
    assert seen == [False, False, False, True]


@pytest.mark.parametrize("kind", [ConfigError, FatalError])
def test_an_error_that_ends_the_stage_is_raised(queue, kind):
    class Special(kind):
        def __init__(self, first, second):
            super().__init__(f"{first} {second}", code="disk")

    answer = as_answer(Special("this", "that"))
    assert type(answer) is kind
    with raises(kind, "disk", "this that"):
        DrivenRank(number=0).handle_answer(answer, queue)


@pytest.mark.parametrize(("excused", "failures"), [(False, {0}), (True, set())])
def test_what_a_lost_rank_had_is_done_again(queue, excused, failures, tmp_path):
    rank, stage = DrivenRank(number=0), ToyStage(tmp_path)
    rank.report_lost_unit(queue, "the actor died", stage)
    assert len(queue) == 2
    unit = make_unit(0, cost=0.0, size=1, params={})
    for _ in range(3):
        rank.unit = unit
        rank.report_lost_unit(queue, "the actor died", stage, excused=excused)
    assert set(queue.failures) == failures
    if failures:
        assert queue.failures[0].message == f"the actor died; its log is {stage.dir.rank_log(0)}"


def test_failed_starts_count_by_place_until_one_succeeds():
    starts = FailedStarts()
    assert [starts.add("died", 1) for _ in range(3)] == [1, 2, 3]
    assert starts.too_many(1)
    assert not starts.too_many(2)
    assert starts.last == "died"
    starts.reset(1)
    assert not starts.too_many(1)
    starts.reset(5)


def test_a_unit_is_set_aside_only_where_more_than_so_many_wait(queue):
    rank = DrivenRank(number=0)
    assert rank.take_unit(queue, 1).index == 1
    assert rank.following is None
    queue.give_back(rank.unit)
    assert rank.take_unit(queue, 0).index == 1
    assert (rank.following.index, len(queue)) == (0, 0)
    assert rank.take_unit(queue, 0).index == 0
    assert (rank.following, rank.take_unit(queue, 0)) == (None, None)


def test_a_unit_that_is_set_aside_and_not_done_is_the_next_again(queue, heard):
    rank = DrivenRank(number=0)
    rank.take_unit(queue, 0)
    rank.give_back(queue)
    rank.give_back(queue)
    assert (len(queue), queue.following().index) == (1, 0)
    assert heard.failed == {}
