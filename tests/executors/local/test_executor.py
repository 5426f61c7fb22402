"""The local executor: real processes on this machine, their starts, their logs, and how they end."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
from support.errors import raises
from support.toy_stage import (
    DiesBesideAnIdleRank,
    DiesIdle,
    EndsTheForkServer,
    GoesBlind,
    ToyStage,
    Unloadable,
    is_running,
    run,
)

from sharmill.engine.unit import make_unit
from sharmill.errors import DeviceError, FatalError


@pytest.fixture(autouse=True)
def _no_process_is_left(tmp_path):
    yield
    stage = ToyStage(tmp_path)
    assert [pid for pid in stage.pids() - {os.getpid()} if is_running(pid)] == []


def rank_logs(stage):
    return "".join(path.read_text() for path in stage.dir.logs.glob("rank-*.log"))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "does"), [(1, "hold_gil"), (2, "hold_gil"), (2, "wait:never")])
def test_a_unit_that_hangs_is_tried_three_times_after_all_others_and_given_up(tmp_path, workers, does):
    stage = ToyStage(tmp_path, units=4, behaviour={0: does}, setup_does=f"meet:{workers}")
    stage.unit_time_limit = 2.0
    result, _ = run(stage, workers)
    message = result.failures[0].message
    assert message.startswith("it took longer than executor.unit_time_limit of 2 s; its log is ")
    assert stage.attempts() == {0: 3, 1: 1, 2: 1, 3: 1}
    assert "in _do_" in Path(message.rpartition("its log is ")[2]).read_text(), "where it hung is in the log"


@pytest.mark.parametrize(("setting", "cost", "limit"), [
    (None, 1e6, None), (7.5, 1e6, 7.5), ("auto", 10.0, 3600.0), ("auto", 0.0, 3600.0), ("auto", 1000.0, 10_000.0),
])  # fmt: skip
def test_the_limit_is_as_set_or_ten_seconds_for_each_of_cost_and_an_hour_at_least(tmp_path, setting, cost, limit):
    stage = ToyStage(tmp_path)
    stage.unit_time_limit = setting
    assert stage.time_limit(make_unit(0, cost=cost, size=1, params={})) == limit


@pytest.mark.parametrize(("workers", "limit"), [(1, "auto"), (1, 60.0), (2, "auto")])
def test_one_worker_without_a_time_limit_of_its_own_runs_inline(tmp_path, workers, limit):
    stage = ToyStage(tmp_path, units=1)
    stage.unit_time_limit = limit
    run(stage, workers)
    assert (stage.pids() == {os.getpid()}) == (workers == 1 and limit == "auto")


def test_there_are_no_more_ranks_than_units(tmp_path):
    stage = ToyStage(tmp_path, units=2, setup_does="meet:2")
    run(stage, 5)
    assert len(stage.pids()) == 2


def test_largest_units_come_first(tmp_path):
    stage = ToyStage(tmp_path, units=8)
    run(stage, 1)
    assert [int(line.split()[0]) for line in stage.marked("attempts")] == [3, 7, 2, 6, 1, 5, 0, 4]


def test_a_rank_that_dies_after_its_commit_counts_once(tmp_path):
    stage = ToyStage(tmp_path, setup_does="die_after_commit:2")
    result, heard = run(stage, 2)
    assert (result.ok, result.totals.num_in, result.totals.num_out) == (True, 18, 18)
    assert sorted(heard.done) == list(range(6))
    assert stage.attempts()[2] == 1


def test_a_rank_that_fails_twice_in_a_row_makes_way_for_a_fresh_one(tmp_path):
    stage = ToyStage(tmp_path, units=2, behaviour={0: "raise", 1: "raise"}, setup_does="meet:2")
    run(stage, 2)
    assert stage.attempts() == {0: 3, 1: 3}
    assert len(stage.pids()) > 2


@pytest.mark.parametrize(("does", "how"), [("kill", "SIGKILL"), ("exit:7", "7")])
def test_set_up_that_always_dies_ends_the_stage(tmp_path, does, how):
    stage = ToyStage(tmp_path, setup_does=does)
    with raises(FatalError, "no_ranks", "toy", how, str(stage.dir.logs)):
        run(stage, 2)
    assert len(stage.pids()) == 6
    assert f"signal {how}" in stage.dir.driver_log.read_text() or f"status {how}" in stage.dir.driver_log.read_text()


@pytest.mark.parametrize("does", ["kill_once", "one_is_slow", pytest.param("hang_at_exit", marks=pytest.mark.slow)])
def test_ranks_that_die_once_or_still_load_or_hang_at_their_end_hold_nobody_up(tmp_path, does):
    stage = ToyStage(tmp_path, units=2, setup_does=does)
    assert run(stage, 2)[0].ok
    assert sorted(stage.attempts()) == [0, 1]


def test_a_stage_that_cannot_be_unpickled_leaves_its_traceback_in_the_log(tmp_path):
    stage = Unloadable(tmp_path)
    with raises(FatalError, "no_ranks"):
        run(stage, 2)
    assert "these are not the bytes" in rank_logs(stage)


def test_a_rank_that_sees_its_input_no_more_is_given_up_alone(tmp_path):
    stage = GoesBlind(tmp_path)
    result, heard = run(stage, 2)
    assert (result.ok, result.totals.rejects, heard.failed) == (True, {}, {})
    assert stage.attempts()[2] == 2
    [sentence] = result.given_up
    assert "this node does not see the audio" in sentence


def test_where_no_rank_sees_its_input_nothing_is_rejected(tmp_path):
    stage = GoesBlind(tmp_path)
    with raises(DeviceError, "unlike_nodes", "does not see the audio"):
        run(stage)
    assert not stage.dir.rejects.exists()


@pytest.mark.parametrize(("kind", "attempts"), [(DiesBesideAnIdleRank, {0: 1, 1: 2}), (DiesIdle, {0: 1, 1: 1})])
def test_an_idle_rank_takes_over_what_a_dead_one_left(tmp_path, kind, attempts):
    """The rank that has nothing more to do stays until all is done: no other has to load the model again."""
    stage = kind(tmp_path, units=2, setup_does="meet:2")
    assert run(stage, 2)[0].ok
    assert stage.attempts() == attempts
    assert len(stage.pids()) == 2


def test_a_death_that_a_child_process_hides_is_noticed(tmp_path):
    """A process that the rank forked holds its pipe and its sentinel open."""
    stage = ToyStage(tmp_path, units=3, behaviour={2: "fork_and_die_once"})
    try:
        assert run(stage, 2)[0].ok
    finally:
        for line in stage.marked("children"):
            os.kill(int(line), signal.SIGKILL)


@pytest.mark.parametrize("text", ["", "raise ImportError('no such library')"])
def test_imports_are_made_once_for_all_ranks_and_those_that_fail_are_left_to_them(tmp_path, monkeypatch, text):
    monkeypatch.syspath_prepend(str(tmp_path))
    counted = f"print('from the import'); open({str(tmp_path / 'imports')!r}, 'a').write('one')\n"
    (tmp_path / "noted_module.py").write_text(counted + text)
    stage = ToyStage(tmp_path, units=4, setup_does="meet:2")
    stage.modules = partial(list, ["noted_module"])
    assert run(stage, 2)[0].ok
    assert len(stage.pids()) == 2
    assert (tmp_path / "imports").read_text() == "one"
    assert "from the import" in stage.dir.driver_log.read_text()


def test_ranks_go_on_where_the_process_that_they_are_forked_from_has_ended(tmp_path):
    stage = EndsTheForkServer(tmp_path, units=4)
    assert run(stage, 2)[0].ok
    assert [pid for pid in map(int, stage.marked("ended")) if is_running(pid)] == []


@pytest.mark.parametrize(
    ("does", "lines"),
    [("raise", ["in _do_raise"]), ("segfault", ["Segmentation fault", "in _do_segfault"]),
     ("print:hello from unit 2", ["hello from unit 2\n", "from native code\n"])],
)  # fmt: skip
def test_the_log_of_a_rank_has_what_it_printed_and_how_it_failed(tmp_path, capfd, does, lines):
    stage = ToyStage(tmp_path, behaviour={2: does}, setup_does="meet:2")
    run(stage, 2)
    assert [rank_logs(stage).count(line) for line in lines] == [3] * len(lines)
    assert "hello" not in "".join(capfd.readouterr())
