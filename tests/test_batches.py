"""Batches by padded length, and results made ahead in order."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharmill.batches import map_ahead, pad, padded_batches

LENGTHS = st.lists(st.integers(0, 50) | st.floats(0, 50), max_size=60)


@given(LENGTHS, st.floats(0.1, 200), st.booleans())
def test_every_item_is_in_one_batch(lengths, max_padded, equal_only):
    batches = padded_batches(lengths, max_padded, equal_only=equal_only)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(batches)


@given(LENGTHS, st.floats(0.1, 200), st.booleans())
def test_a_batch_of_several_is_within_the_limit(lengths, max_padded, equal_only):
    for batch in padded_batches(lengths, max_padded, equal_only=equal_only):
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or len(batch) * longest <= max_padded
        assert not equal_only or len({lengths[index] for index in batch}) == 1


@given(LENGTHS, st.floats(0.1, 200), st.booleans())
def test_the_longest_come_first_and_ties_in_order(lengths, max_padded, equal_only):
    order = [index for batch in padded_batches(lengths, max_padded, equal_only=equal_only) for index in batch]
    assert order == sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


@given(LENGTHS, st.floats(0.1, 200))
def test_no_batch_could_have_taken_the_first_of_the_next(lengths, max_padded):
    batches = padded_batches(lengths, max_padded)
    for batch in batches[:-1]:
        assert (len(batch) + 1) * lengths[batch[0]] > max_padded


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ahead", [0, 1, 5, 100])
def test_results_come_in_the_order_of_the_items(threads, ahead):
    assert list(map_ahead(lambda item: item * 2, range(50), threads=threads, ahead=ahead)) == list(range(0, 100, 2))


def test_nothing_gives_nothing():
    assert list(map_ahead(str, [], threads=2, ahead=3)) == []


@pytest.mark.parametrize(("threads", "ahead", "most"), [(1, 4, 4), (2, 0, 2), (2, 7, 7), (4, 2, 4)])
def test_no_more_is_begun_than_the_weight_allows(threads, ahead, most):
    begun = 0
    lock = threading.Lock()

    def count(item):
        nonlocal begun
        with lock:
            begun += 1
        return item

    for taken, item in enumerate(map_ahead(count, range(30), threads=threads, ahead=ahead)):
        assert item == taken
        # Those that wait, and the one just handed out.
        assert begun <= taken + 1 + most


def test_heavy_items_wait_in_smaller_numbers():
    weights = [10.0] * 5 + [1.0] * 50
    taken_from = 0

    def items():
        nonlocal taken_from
        for index in range(len(weights)):
            taken_from += 1
            yield index

    waiting = []
    ahead = map_ahead(lambda index: index, items(), threads=1, ahead=20.0, weigh=lambda index: weights[index])
    for index in ahead:
        waiting.append((sum(weights[index + 1 : taken_from]), taken_from - index - 1))
    assert max(weight for weight, _ in waiting) <= 20.0
    assert waiting[0] == (20.0, 2)
    assert max(count for _, count in waiting) == 20


def test_results_are_made_ahead():
    """The second result is made while the first is still being used."""
    made = threading.Event()
    results = map_ahead(lambda item: made.set() if item == 1 else None, [0, 1, 2], threads=1, ahead=2)
    next(results)
    assert made.wait(10)


def test_threads_work_at_the_same_time():
    meeting = threading.Barrier(3, timeout=10)
    assert len(list(map_ahead(lambda item: meeting.wait(), range(6), threads=3, ahead=3))) == 6


def test_an_error_comes_where_its_result_would_have_come():
    def fail_at_3(item):
        if item == 3:
            raise ValueError("three")
        return item

    results = map_ahead(fail_at_3, range(10), threads=2, ahead=5)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)
    assert list(results) == []


def test_an_error_of_the_items_comes_through():
    def items():
        yield 1
        raise KeyError("items")

    with pytest.raises(KeyError, match="items"):
        list(map_ahead(str, items(), threads=1, ahead=4))


def test_who_stops_early_leaves_no_thread_and_no_work_behind():
    begun = []
    gate = threading.Event()

    def work(item):
        begun.append(item)
        if item == 1:
            gate.wait(10)
        return item

    results = map_ahead(work, range(100), threads=1, ahead=50)
    next(results)
    gate.set()
    results.close()
    assert len(begun) < 60
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


def test_padding_keeps_the_items_and_adds_zeros():
    padded, lengths = pad([np.ones(3, np.float32), np.full(5, 2, np.float32), np.empty(0, np.float32)])
    assert lengths.tolist() == [3, 5, 0]
    assert padded.tolist() == [[1, 1, 1, 0, 0], [2] * 5, [0] * 5]
    assert str(padded.dtype) == "torch.float32"
