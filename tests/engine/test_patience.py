"""Waiting for files of other nodes: as long as they may be late, no longer, and not where nothing is late."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest
from support.toy_stage import ToyStage, run

from sharmill.engine import ledger
from sharmill.engine.claims import Rank
from sharmill.engine.fence import make_fence, wait_for_plan
from sharmill.engine.ledger import read_ledger, wait_for_units
from sharmill.engine.patience import Patience
from sharmill.engine.plan import load_plan, read_or_make_plan
from sharmill.engine.state import begin_round
from sharmill.engine.work import work
from sharmill.executors.slurm.executor import wait_for_stage


@pytest.fixture
def waited(monkeypatch):
    """The seconds of all waits; nothing really waits."""
    seconds, really_sleep = [], time.sleep

    def sleep(duration):
        # A thread that another test has left does not count.
        note = seconds.append if threading.current_thread() is threading.main_thread() else really_sleep
        note(duration)

    monkeypatch.setattr(time, "monotonic", lambda: sum(seconds))
    monkeypatch.setattr(time, "sleep", sleep)
    return seconds


def test_what_is_seen_is_not_waited_for(waited):
    assert Patience(60.0).wait_until(lambda: True, "it")
    assert waited == []


def test_waiting_ends_with_what_is_waited_for(waited):
    assert Patience(60.0).wait_until(lambda: sum(waited) > 5.0, "it")
    assert 5.0 < sum(waited) < 7.0


def test_waiting_is_bounded_over_all_that_is_waited_for_and_names_it(waited, caplog):
    patience = Patience(60.0)
    for name in ("the plan", "the ledger"):
        assert not patience.wait_until(lambda: False, name)
    assert sum(waited) == pytest.approx(60.0)
    assert [record.getMessage().split(" after")[0] for record in caplog.records] == [
        "the plan cannot be seen here,",
        "the ledger cannot be seen here,",
    ]


def test_without_lateness_nothing_is_waited_for(waited):
    assert not Patience(0.0).wait_until(lambda: False, "it")
    assert not Patience(0.0).outlasts(FileNotFoundError(errno.ENOENT, "", "a"))
    assert waited == []


@pytest.mark.parametrize(("number", "is_late"), [(errno.ESTALE, True), (errno.ENOENT, True), (errno.EIO, False)])
def test_only_errors_of_late_views_are_outlasted(waited, number, is_late):
    patience = Patience(60.0)
    assert patience.outlasts(OSError(number, "")) == is_late
    if not is_late:
        with pytest.raises(OSError, match="") as raised:
            patience.wait_until(lambda: (_ for _ in ()).throw(OSError(number, "")), "it")
        assert raised.value.errno == number


def test_work_is_done_again_until_it_sees_its_files(waited):
    def work():
        if sum(waited) < 5.0:
            raise OSError(errno.ESTALE, "")
        return 7

    assert Patience(60.0).once_seen(work) == 7
    with pytest.raises(OSError, match="") as raised:
        Patience(3.0).once_seen(lambda: (_ for _ in ()).throw(FileNotFoundError(errno.ENOENT, "")))
    assert raised.value.errno == errno.ENOENT


def test_a_plan_and_units_that_never_show_are_given_up(waited, tmp_path):
    stage = ToyStage(tmp_path, units=2)
    stage.seconds_until_seen = 30.0
    units = read_or_make_plan(stage, restart=False)
    wait_for_plan(stage, Patience(30.0))
    assert sum(waited) == pytest.approx(30.0)
    assert wait_for_units(stage, units, units, ()) == ({}, units)
    assert sum(waited) == pytest.approx(60.0)


def test_a_plan_that_another_node_has_made_is_taken_once_it_shows(waited, tmp_path, monkeypatch):
    first, second = (ToyStage(tmp_path, units=2) for _ in range(2))
    read_or_make_plan(first, restart=False)
    second.seconds_until_seen = 30.0
    exists, late = Path.exists, second.dir.identity
    monkeypatch.setattr(Path, "exists", lambda path: exists(path) and (path != late or sum(waited) > 5.0))
    read_or_make_plan(second, restart=False)
    assert second.token == first.token
    assert 5.0 < sum(waited) < 7.0


def test_a_node_that_was_killed_while_it_asked_for_a_plan_is_no_planner(waited, tmp_path):
    stage = ToyStage(tmp_path, units=2)
    stage.seconds_until_seen = 30.0
    stage.dir.plan.mkdir(parents=True)
    assert len(read_or_make_plan(stage, restart=False)) == 2
    assert waited == []


def test_units_that_failed_are_not_waited_for(waited, tmp_path):
    stage = ToyStage(tmp_path, units=2)
    stage.seconds_until_seen = 30.0
    units = read_or_make_plan(stage, restart=False)
    assert wait_for_units(stage, units, units, [unit.index for unit in units]) == ({}, units)
    assert waited == []


def test_units_that_show_late_are_taken_from_the_look_that_saw_them(waited, tmp_path, monkeypatch):
    stage = ToyStage(tmp_path, units=2)
    stage.seconds_until_seen = 30.0
    assert run(stage)[0].ok
    waited.clear()
    units, looks = load_plan(stage), []

    def read_late(paths, units):
        looks.append(sum(waited))
        if looks[-1] < 5.0:
            raise OSError(errno.ESTALE, "")
        return read_ledger(paths, units)

    monkeypatch.setattr(ledger, "read_ledger", read_late)
    commits, missing = wait_for_units(stage, units, units, ())
    assert (sorted(commits), missing) == ([0, 1], [])
    assert 5.0 <= looks[-1] < 10.0
    assert [look for look in looks if look >= 5.0] == looks[-1:]


def test_an_error_that_does_not_pass_ends_the_stage(waited, tmp_path, monkeypatch):
    stage = ToyStage(tmp_path, units=2)
    stage.seconds_until_seen = 30.0
    units = read_or_make_plan(stage, restart=False)

    def refuse(paths, units):
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(ledger, "read_ledger", refuse)
    with pytest.raises(OSError, match="stale"):
        wait_for_units(stage, units, units, ())
    assert sum(waited) == pytest.approx(30.0)


def test_where_no_ranks_have_run_only_the_plan_is_waited_for(waited, tmp_path):
    stage = ToyStage(tmp_path, units=2)
    read_or_make_plan(stage, restart=False)
    make_fence(stage)
    token, behind = stage.token, ToyStage(tmp_path, units=2)
    behind.seconds_until_seen = 30.0
    wait_for_stage([behind], stage.name, token, had_ranks=False)
    assert waited == []
    wait_for_stage([behind], stage.name, token)
    assert sum(waited) == pytest.approx(30.0)


def test_a_rank_waits_for_the_input_that_the_plan_was_made_of(waited, tmp_path, monkeypatch):
    stage = ToyStage(tmp_path, units=2)
    stage.seconds_until_seen = 30.0
    read_or_make_plan(stage, restart=False)
    make_fence(stage)
    opened = []
    monkeypatch.setattr(stage, "sees_input", lambda: sum(waited) > 5.0)
    monkeypatch.setattr(stage, "open", lambda device: opened.append(sum(waited)) or ToyStage.open(stage, device))
    begin_round(stage, load_plan(stage), 1)
    work(stage, Rank(0, "node/rank 0", "cpu"))
    assert 5.0 < opened[0] < 7.0
