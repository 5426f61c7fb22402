"""Prefetching of the next unit's input while the current unit is processed."""

from unittest import mock

import pytest

from sharmill.engine.ahead import AheadProcessor
from sharmill.engine.unit import make_unit

FIRST, SECOND, DAMAGED = (make_unit(index, cost=1.0, size=1, params={}) for index in range(3))


class Loading(AheadProcessor):
    def __init__(self):
        super().__init__(mock.Mock(memory_mb=0.0))
        self.begun = []

    def begin(self, unit):
        self.begun.append(unit)
        if unit == DAMAGED:
            raise ValueError("damaged")
        return unit.index

    def process(self, unit, staging, advance):
        raise NotImplementedError


@pytest.fixture
def ahead():
    return Loading()


def test_the_expected_unit_is_begun_once_and_before_it_is_taken(ahead):
    ahead.expect(SECOND)
    assert ahead.take(FIRST) == 0
    # Tasks of failed units are dropped when the next unit is taken.
    ahead.feeders.drop_earlier.assert_called_once_with()
    ahead.begin_next()
    ahead.begin_next()
    assert ahead.begun == [FIRST, SECOND]
    assert ahead.take(SECOND) == 1
    assert ahead.begun == [FIRST, SECOND]


@pytest.mark.parametrize("comes", [SECOND, DAMAGED])
def test_an_error_is_that_of_its_own_unit(ahead, comes):
    ahead.expect(DAMAGED)
    ahead.begin_next()
    if comes == DAMAGED:
        with pytest.raises(ValueError, match="damaged"):
            ahead.take(DAMAGED)
    assert ahead.take(SECOND) == 1
