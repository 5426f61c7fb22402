"""The limit of an attempt at a unit: from its cost and what its rank has done, or set."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest
from support.toy_stage import wait_until

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
