"""The order of an epoch: what follows from (seed, epoch), and its division into parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharmill.shar.reading.order import BEGINNING, END, Order, Position, count_blocks

ORDERS = st.builds(
    lambda shards, size, block, shuffle, seed, mix: Order(
        shards, count_blocks(shards, size, block), shuffle, seed, mix
    ),
    st.integers(1, 30),
    st.integers(1, 20),
    st.none() | st.integers(1, 25),
    st.booleans(),
    st.integers(0, 2**63),
    st.integers(1, 9),
)


def all_positions(order: Order, epoch: int, count: int) -> list[Position]:
    positions = []
    for group in range(order.num_groups):
        for slot in order.slots(group):
            draws, blocks = order.positions(epoch, slot, count)
            positions += [
                Position(group, *values) for values in zip(draws.tolist(), blocks.tolist(), range(count), strict=True)
            ]
    return positions


@given(ORDERS, st.integers(0, 5))
def test_every_shard_has_one_slot_and_every_slot_one_group(order, epoch):
    assert sorted(order.permutation(epoch).tolist()) == list(range(order.num_shards))
    slots = [slot for group in range(order.num_groups) for slot in order.slots(group)]
    assert slots == list(range(order.num_shards))


@given(ORDERS, st.integers(0, 5), st.integers(1, 30))
def test_places_are_different_and_tell_their_group(order, epoch, count):
    positions = all_positions(order, epoch, count)
    assert len({(position.block, position.item) for position in positions}) == len(positions)
    assert all(order.group_of(position.block) == position.group for position in positions)
    assert all(BEGINNING < position < END for position in positions)


def test_without_shuffling_the_order_is_that_of_the_dataset():
    order = Order(3, count_blocks(3, 4, 2))
    positions = all_positions(order, 7, 4)
    assert positions == sorted(positions)
    assert order.permutation(7).tolist() == [0, 1, 2]
    assert [position.block for position in positions] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_the_order_is_fixed_for_all_times():
    order = Order(10, count_blocks(10, 5, 2), shuffle=True, seed=42, mix_shards=4)
    assert order.permutation(3).tolist() == [7, 4, 5, 6, 8, 0, 1, 3, 9, 2]
    assert order.positions(3, 1, 3).draws.tolist() == [3382524837571898, 1526206355727367, 3220001052938495]


def test_seed_and_epoch_change_the_order():
    def permutation(seed, epoch):
        return Order(50, 1, shuffle=True, seed=seed).permutation(epoch).tolist()

    found = {tuple(permutation(seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(found) == 25


def test_draws_are_spread_evenly():
    order = Order(1, 1, shuffle=True)
    draws = order.positions(0, 0, 100_000).draws / 2**53
    assert np.histogram(draws, bins=10, range=(0, 1))[0] == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize(
    ("num_shards", "shard_size", "wish", "expected"),
    [
        (5, 50, None, 50),  # few cuts: one by one
        (1000, 1000, None, 5),  # a million: about 4096 blocks
        (10_000, 1000, None, 1),  # many shards: whole ones
        (5, 50, 20, 3),
        (5, 50, 50, 1),
        (5, 0, None, 1),  # nothing in any
    ],
)
def test_blocks_are_whole_shards_or_about_4096(num_shards, shard_size, wish, expected):
    assert count_blocks(num_shards, shard_size, wish) == expected


def owners(order: Order, epoch: int, counts: np.ndarray, num_parts: int) -> np.ndarray:
    """The part of each cut, in the order of the dataset."""
    found = [np.zeros(0, np.int64)] * len(counts)
    for slot, shard in enumerate(order.permutation(epoch).tolist()):
        found[shard] = order.positions(epoch, slot, int(counts[shard])).blocks % num_parts
    return np.concatenate(found)


UNEVEN = np.random.default_rng(0).integers(1, 49, 100)
SPLITS = [
    (np.full(4, 1000), 8),  # cut by cut
    (np.full(400, 1000), 11),  # blocks do not divide shards evenly, and parts divide the blocks of a shard
    (np.full(1000, 1000), 40),
    (1000 - np.arange(40) % 7, 8),
    (UNEVEN, 16),
]


@pytest.mark.parametrize(("counts", "num_parts"), SPLITS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_are_about_equal(counts, num_parts, shuffle):
    order = Order(len(counts), count_blocks(len(counts), int(counts.max()), None), shuffle, mix_shards=8)
    sizes = np.bincount(owners(order, 0, counts, num_parts), minlength=num_parts)
    assert sizes == pytest.approx(sizes.mean(), rel=0.02 if counts is not UNEVEN else 0.12)


@pytest.mark.parametrize(("counts", "num_parts"), SPLITS)
def test_shuffled_parts_have_other_cuts_in_every_epoch(counts, num_parts):
    order = Order(len(counts), count_blocks(len(counts), int(counts.max()), None), shuffle=True, mix_shards=8)
    first, second, third = (owners(order, epoch, counts, num_parts) for epoch in range(3))
    for one, other in ((first, second), (second, third), (first, third)):
        assert np.mean(one == other) == pytest.approx(1 / num_parts, abs=0.02)
    together = np.mean((second == second[0])[first == first[0]])
    assert together == pytest.approx(1 / num_parts, abs=0.12)
