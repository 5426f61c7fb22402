"""The input of the next unit, made ready while one is at work."""

from __future__ import annotations

import threading

import pytest

from sharmill.engine.ahead import UnitsAhead
from sharmill.engine.unit import make_unit

FIRST, SECOND, THIRD = (make_unit(index, cost=1.0, size=1, params={}) for index in range(3))


@pytest.fixture
def loaded():
    return []


@pytest.fixture
def ahead(loaded):
    def load(unit):
        loaded.append((unit.index, threading.current_thread() is threading.main_thread()))
        if unit == SECOND:
            raise ValueError("damaged")
        return unit.index * 10

    ahead = UnitsAhead(load)
    yield ahead
    ahead.close()


def test_the_expected_unit_is_loaded_beside_the_one_at_work(ahead, loaded):
    ahead.expect(THIRD)
    assert ahead.take(FIRST) == 0
    ahead.begin()
    ahead.expect(None)
    assert ahead.take(THIRD) == 20
    ahead.begin()
    assert loaded == [(0, True), (2, False)]


def test_an_error_is_that_of_its_own_unit(ahead):
    ahead.expect(SECOND)
    ahead.take(FIRST)
    ahead.begin()
    with pytest.raises(ValueError, match="damaged"):
        ahead.take(SECOND)
    assert ahead.take(THIRD) == 20


def test_another_unit_than_the_expected_one_is_loaded_for_itself(ahead, loaded):
    ahead.expect(SECOND)
    ahead.take(FIRST)
    ahead.begin()
    assert ahead.take(THIRD) == 20
    with pytest.raises(ValueError, match="damaged"):
        ahead.take(SECOND)
    assert (1, True) in loaded


@pytest.mark.parametrize("give_up", [UnitsAhead.close, lambda ahead: ahead.take(THIRD)])
def test_what_was_made_ready_and_is_not_taken_is_dropped(give_up):
    dropped, begun = [], threading.Event()
    ahead = UnitsAhead(lambda unit: begun.set() or unit.index, dropped.append)
    ahead.expect(SECOND)
    ahead.begin()
    assert begun.wait(60)
    give_up(ahead)
    ahead.close()
    assert dropped == [SECOND.index]
