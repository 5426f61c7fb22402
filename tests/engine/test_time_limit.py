"""The limit of an attempt at a unit: from its cost and what its rank has done, or set."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest
from support.toy_stage import wait_until

from sharmill.engine.time_limit import UnitTimedOut, ended_after, find_limit
from sharmill.engine.unit import make_unit


@pytest.mark.parametrize(("setting", "cost", "limit"), [
    (None, 1e6, None), (7.5, 1e6, 7.5), ("auto", 10.0, 3600.0), ("auto", 0.0, 3600.0), ("auto", 1000.0, 10_000.0),
])  # fmt: skip
def test_the_limit_is_as_set_or_ten_seconds_for_each_of_cost_and_an_hour_at_least(setting, cost, limit):
    assert find_limit(setting, make_unit(0, cost=cost, size=1, params={})) == limit


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
