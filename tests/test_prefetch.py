"""Results made ahead of their use, in order."""

from __future__ import annotations

import threading

import pytest
from support.toy_stage import wait_until

from sharmill.prefetch import prefetch


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ahead", [0, 1, 5, 100])
def test_results_come_in_the_order_of_the_items(threads, ahead):
    assert list(prefetch(lambda item: item * 2, range(50), threads=threads, ahead=ahead)) == list(range(0, 100, 2))


def test_nothing_gives_nothing():
    assert list(prefetch(str, [], threads=2, ahead=3)) == []


@pytest.mark.parametrize(("threads", "ahead", "most"), [(1, 4, 4), (2, 0, 2), (2, 7, 7), (4, 2, 4)])
def test_no_more_is_begun_than_the_weight_allows(threads, ahead, most):
    begun = 0
    lock = threading.Lock()

    def count(item):
        nonlocal begun
        with lock:
            begun += 1
        return item

    for taken, item in enumerate(prefetch(count, range(30), threads=threads, ahead=ahead)):
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
    ahead = prefetch(lambda index: index, items(), threads=1, ahead=20.0, weigh=lambda index: weights[index])
    for index in ahead:
        waiting.append((sum(weights[index + 1 : taken_from]), taken_from - index - 1))
    assert max(weight for weight, _ in waiting) <= 20.0
    assert waiting[0] == (20.0, 2)
    assert max(count for _, count in waiting) == 20


def test_results_are_made_ahead():
    """The second result is made while the first is still being used."""
    made = threading.Event()
    results = prefetch(lambda item: made.set() if item == 1 else None, [0, 1, 2], threads=1, ahead=2)
    next(results)
    assert made.wait(10)


def test_threads_work_at_the_same_time():
    meeting = threading.Barrier(3, timeout=60)
    assert len(list(prefetch(lambda item: meeting.wait(), range(6), threads=3, ahead=3))) == 6


def test_an_error_comes_where_its_result_would_have_come():
    def fail_at_3(item):
        if item == 3:
            raise ValueError("three")
        return item

    results = prefetch(fail_at_3, range(10), threads=2, ahead=5)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)
    assert list(results) == []


def test_an_error_of_the_items_comes_through():
    def items():
        yield 1
        raise KeyError("items")

    with pytest.raises(KeyError, match="items"):
        list(prefetch(str, items(), threads=1, ahead=4))


def test_who_stops_early_leaves_no_thread_and_no_work_behind():
    begun = []
    gate = threading.Event()

    def work(item):
        begun.append(item)
        if item == 1:
            gate.wait(10)
        return item

    before = {*threading.enumerate()}
    results = prefetch(work, range(100), threads=1, ahead=50)
    next(results)
    gate.set()
    results.close()
    assert len(begun) < 60
    wait_until(lambda: {*threading.enumerate()} <= before)


def test_who_drops_it_does_not_wait_for_what_is_under_way():
    """The garbage collector may drop it, in a thread whose locks the others need to end."""
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def work(item):
        if item == 1:
            begun.set()
            gate.wait(10)
            ended.set()

    results = prefetch(work, range(3), threads=1, ahead=2)
    next(results)
    assert begun.wait(60)
    del results
    assert not ended.is_set()
    gate.set()
    assert ended.wait(60)
