"""The balance of work over ranks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharmill.engine.balance import pack

COSTS = st.lists(st.integers(0, 50) | st.floats(0, 1e6, allow_subnormal=False), max_size=200)
BINS = st.integers(1, 20)


def loads(costs, bins):
    return [math.fsum(costs[item] for item in items) for items in bins]


def best_possible_maximum(costs, num_bins):
    """The least possible load of the fullest bin, by trying everything."""
    return min(
        max(sum(cost for cost, place in zip(costs, places, strict=True) if place == index) for index in range(num_bins))
        for places in itertools.product(range(num_bins), repeat=len(costs))
    )


@given(COSTS, BINS)
def test_every_item_is_in_exactly_one_bin(costs, num_bins):
    bins = pack(costs, num_bins)
    assert len(bins) == num_bins
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(len(costs)))


@given(COSTS.filter(bool), BINS)
def test_no_bin_exceeds_the_list_scheduling_bound(costs, num_bins):
    # Graham 1966: when its last item came, the fullest bin held no more than the mean of all other items.
    bound = sum(costs) / num_bins + (1 - 1 / num_bins) * max(costs)
    assert max(loads(costs, pack(costs, num_bins))) <= bound * (1 + 1e-9)


@given(COSTS.filter(bool), BINS)
def test_taking_one_item_off_the_fullest_bin_makes_it_the_lightest(costs, num_bins):
    bins = pack(costs, num_bins)
    every = loads(costs, bins)
    for items, load in zip(bins, every, strict=True):
        if items:
            assert load - costs[items[-1]] <= min(every) + 1e-9 * sum(costs)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_bin_is_within_grahams_factor_of_the_best_possible(costs, num_bins):
    factor = 4 / 3 - 1 / (3 * num_bins)
    limit = factor * best_possible_maximum(costs, num_bins)
    assert max(loads(costs, pack(costs, num_bins))) <= limit + 1e-9


@given(COSTS, BINS)
def test_each_bin_is_in_order_of_decreasing_cost_and_of_index_among_equal_costs(costs, num_bins):
    for items in pack(costs, num_bins):
        assert items == sorted(items, key=lambda item: (-costs[item], item))


@given(COSTS, BINS)
def test_equal_costs_in_other_containers_give_equal_bins(costs, num_bins):
    assert pack(np.array(costs, dtype=np.float64), num_bins) == pack(iter(costs), num_bins)


def test_ties_go_to_the_lower_item_and_the_lower_bin():
    assert pack([5, 5, 5, 5, 5], 3) == [[0, 3], [1, 4], [2]]


def test_the_textbook_example():
    # Graham's worst case for two machines: 7 where 6 is possible.
    assert pack([3, 3, 2, 2, 2], 2) == [[0, 2, 4], [1, 3]]


def test_bins_without_items_are_there_and_empty():
    assert pack([1.5], 3) == [[0], [], []]
    assert pack([], 2) == [[], []]


@pytest.mark.parametrize("num_bins", [0, -1])
def test_less_than_one_bin_is_refused(num_bins):
    with pytest.raises(ValueError, match="num_bins must be at least 1"):
        pack([1.0], num_bins)


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_a_cost_that_is_no_cost_is_refused_by_its_index(cost):
    with pytest.raises(ValueError, match="the cost of item 1"):
        pack([1.0, cost], 2)
