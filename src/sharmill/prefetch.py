"""Computation of results ahead of their use in a bounded pool of threads: for example, decoding while a model runs."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int,
    ahead: float,
    weigh: Callable[[Item], float] = lambda item: 1.0,
) -> Iterator[Result]:
    """Yield the results of a function in the order of the items, computing results ahead of their use.

    Threads are sufficient, since decoding and resampling release the GIL. An error of the function is raised in place
    of its result.

    Args:
        threads: number of threads; up to this many items are in progress regardless of their weights.
        ahead: limit on the total weight of the items that are in progress or waiting to be used.
        weigh: function that returns the weight of an item.
    """
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="prefetch")
    pending: deque[tuple[Future[Result], float]] = deque()
    weight = 0.0
    try:
        for item in items:
            pending.append((pool.submit(copy_context().run, function, item), weigh(item)))
            weight += pending[-1][1]
            while len(pending) > threads and weight > ahead:
                future, own = pending.popleft()
                weight -= own
                yield future.result()
        while pending:
            yield pending.popleft()[0].result()
    finally:
        for future, _ in pending:
            future.cancel()
        # Waiting could cause a deadlock: the garbage collector may close this generator in a thread of this pool, or in
        # a thread that holds the locks of ``threading``.
        pool.shutdown(wait=False)
