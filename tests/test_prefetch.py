"""Results made ahead of their use, in order."""

import threading

import pytest
from support.toy_stage import wait_until

from sharmill.prefetch import prefetch


@pytest.mark.parametrize(
    ("threads", "ahead", "most"), [(1, 0, 1), (1, 4, 4), (2, 0, 2), (2, 7, 7), (4, 2, 4), (3, 100, 100)]
)
def test_results_are_in_order_and_started_weight_is_bounded(threads, ahead, most):
    begun = 0
    lock = threading.Lock()

    def count(item):
        nonlocal begun
        with lock:
            begun += 1
        return item

    for taken, item in enumerate(prefetch(count, range(30), threads=threads, ahead=ahead)):
        assert item == taken
        # The limit covers waiting items and the item just handed out.
        assert begun <= taken + 1 + most


def numbers_and_an_error(end):
    yield from range(end)
    raise ValueError("of the items")


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
    with pytest.raises(ValueError, match="of the items"):
        list(prefetch(str, numbers_and_an_error(3), threads=2, ahead=5))


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
