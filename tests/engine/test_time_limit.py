"""The limit of an attempt at a unit: from its cost and what its rank has done, or set."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from support.toy_stage import ToyStage, run, wait_until

from sharmill.engine import time_limit
from sharmill.engine.time_limit import TimeLimit, UnitTimedOut, ended_after
from sharmill.engine.unit import make_unit


def unit(cost):
    return make_unit(0, cost=cost, size=1, params={})


@pytest.mark.parametrize("setting", [None, 7.5])
def test_what_is_set_counts_alone(setting):
    limit = TimeLimit(setting)
    limit.note(unit(1.0), 1000.0)
    assert limit.of(unit(1e6)) == setting


def test_the_first_unit_has_an_hour_and_ten_seconds_for_each_of_its_cost():
    limit = TimeLimit("auto")
    assert (limit.of(unit(10.0)), limit.of(unit(1000.0))) == (3600.0, 10000.0)


def test_later_ones_have_thirty_times_what_is_to_be_expected_and_half_an_hour_at_least():
    limit = TimeLimit("auto")
    limit.note(unit(100.0), 50.0)
    limit.note(unit(100.0), 150.0)
    assert (limit.of(unit(10.0)), limit.of(unit(500.0))) == (1800.0, 15000.0)


def test_no_unit_has_less_than_three_times_the_longest():
    limit = TimeLimit("auto")
    limit.note(unit(1.0), 5000.0)
    limit.note(unit(1e6), 5000.0)
    assert limit.of(unit(1.0)) == 15000.0


def test_units_without_cost_have_the_least():
    limit = TimeLimit("auto")
    limit.note(unit(0.0), 5.0)
    assert limit.of(unit(0.0)) == 3600.0


@pytest.fixture
def short(monkeypatch):
    """A limit that hangs in tests can wait for."""
    monkeypatch.setattr(time_limit, "_LEAST_SECONDS", 0.5)
    monkeypatch.setattr(time_limit, "_LEAST_SECONDS_OF_FIRST", 0.5)
    monkeypatch.setattr(time_limit, "_SECONDS_OF_COST", 0.0)


def test_a_unit_that_hangs_in_the_only_rank_fails_three_times_after_all_others(tmp_path, short):
    stage = ToyStage(tmp_path, units=3, behaviour={0: "wait:never"})
    stage.unit_time_limit = "auto"
    result, _ = run(stage, 1)
    assert {index: error.message for index, error in result.failures.items()} == {
        0: "UnitTimedOut: it took longer than executor.unit_time_limit of 0.5 s"
    }
    assert stage.attempts()[0] == 3
    assert [int(line.split()[0]) for line in stage.marked("attempts")][-2:] == [0, 0]


class Swallows(ToyStage):
    """Hangs in unit 0 until the alarm, in a callback of native code that goes on without the exception."""

    def work(self, unit, staging, advance):
        if unit.index == 0:
            with suppress(UnitTimedOut):
                wait_until(lambda: False)
        return super().work(unit, staging, advance)


def test_a_time_out_that_native_code_swallows_publishes_nothing(tmp_path, short):
    stage = Swallows(tmp_path, units=2)
    stage.unit_time_limit = "auto"
    result, heard = run(stage, 1)
    assert (list(result.failures), heard.done) == ([0], [1])
    assert [path.name for path in (stage.root / "first").iterdir()] == ["000001.txt"]


def test_one_that_is_swallowed_is_raised_at_the_end():
    with pytest.raises(UnitTimedOut, match=r"of 0\.05 s"), ended_after(0.05, in_driver=True), suppress(UnitTimedOut):
        wait_until(lambda: False)


def test_an_alarm_at_the_end_leaves_nothing_behind(monkeypatch):
    before, set_timer = signal.getsignal(signal.SIGALRM), signal.setitimer

    def too_late(which, seconds):
        if seconds == 0.0:
            signal.raise_signal(signal.SIGALRM)
        set_timer(which, seconds)

    monkeypatch.setattr(signal, "setitimer", too_late)
    with ended_after(600.0, in_driver=True):
        pass
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


_HANG = """
import sys
from pathlib import Path
from support.toy_stage import ToyStage, run
from sharmill.engine import time_limit
time_limit._LEAST_SECONDS_OF_FIRST, time_limit._SECONDS_OF_COST, time_limit._SECONDS_TO_FAIL = 0.2, 0.0, 0.2
stage = ToyStage(Path(sys.argv[1]), units=1, behaviour={0: "hold_gil"})
stage.unit_time_limit = "auto"
run(stage, 1)
"""


def test_native_code_that_sees_no_exception_ends_the_process_with_a_traceback(tmp_path):
    done = subprocess.run([sys.executable, "-c", _HANG, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "_do_hold_gil" in done.stderr
