"""The balance of work over ranks."""

import itertools
import math

import pytest
from hypothesis import given, strategies as st

from sharmill.engine.balance import pack

COSTS = st.lists(st.integers(0, 50) | st.floats(0, 1e6, allow_subnormal=False), max_size=200)
BINS = st.integers(1, 20)


def loads(costs, bins):
    return [math.fsum(costs[item] for item in items) for items in bins]


def best_possible_maximum(costs, num_bins):
    """Return the least possible load of the fullest bin by exhaustive search."""
    return min(
        max(sum(cost for cost, place in zip(costs, places, strict=True) if place == index) for index in range(num_bins))
        for places in itertools.product(range(num_bins), repeat=len(costs))
    )


@given(COSTS, BINS)
def test_every_item_is_in_exactly_one_bin(costs, num_bins):
    bins = pack(costs, num_bins)
    assert len(bins) == num_bins
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(len(costs)))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_bin_is_within_grahams_bound(costs, num_bins):
    factor = 4 / 3 - 1 / (3 * num_bins)
    limit = factor * best_possible_maximum(costs, num_bins)
    assert max(loads(costs, pack(costs, num_bins))) <= limit + 1e-9


@given(COSTS, BINS)
def test_bins_are_sorted_by_decreasing_cost_then_by_index(costs, num_bins):
    for items in pack(costs, num_bins):
        assert items == sorted(items, key=lambda item: (-costs[item], item))


@pytest.mark.parametrize(
    ("costs", "num_bins", "problem"),
    [
        ([1.0], 0, "num_bins must be at least 1"),
        ([1.0, -1.0], 2, "the cost of item 1"),
        ([1.0, math.nan], 2, "the cost of item 1"),
        ([1.0, math.inf], 2, "the cost of item 1"),
    ],
)
def test_a_bad_number_of_bins_or_a_bad_cost_is_refused(costs, num_bins, problem):
    with pytest.raises(ValueError, match=problem):
        pack(costs, num_bins)
