"""The input of the next unit, made ready while one is at work."""

from __future__ import annotations

import threading

import pytest

from sharmill.engine.ahead import UnitsAhead
from sharmill.engine.unit import make_unit

FIRST, SECOND, DAMAGED = (make_unit(index, cost=1.0, size=1, params={}) for index in range(3))


@pytest.fixture
def ahead():
    def load(unit):
        if unit == DAMAGED:
            raise ValueError("damaged")
        return unit.index, threading.current_thread() is threading.main_thread()

    ahead = UnitsAhead(load)
    yield ahead
    ahead.close()


def test_the_expected_unit_is_loaded_beside_the_one_at_work(ahead):
    ahead.expect(SECOND)
    assert ahead.take(FIRST) == (0, True)
    ahead.begin()
    assert ahead.take(SECOND) == (1, False)


@pytest.mark.parametrize("comes", [SECOND, DAMAGED])
def test_an_error_is_that_of_its_own_unit(ahead, comes):
    ahead.expect(DAMAGED)
    ahead.begin()
    if comes == DAMAGED:
        with pytest.raises(ValueError, match="damaged"):
            ahead.take(DAMAGED)
    assert ahead.take(SECOND) == (1, True)


@pytest.mark.parametrize("give_up", [UnitsAhead.close, lambda ahead: ahead.take(FIRST)])
def test_what_was_made_ready_and_is_not_taken_is_dropped(give_up):
    dropped, begun = [], threading.Event()
    ahead = UnitsAhead(lambda unit: begun.set() or unit.index, dropped.append)
    ahead.expect(SECOND)
    ahead.begin()
    assert begun.wait(60)
    give_up(ahead)
    ahead.close()
    assert dropped == [SECOND.index]
