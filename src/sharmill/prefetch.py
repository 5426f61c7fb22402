"""Computation of results ahead of their use, in a bounded pool of threads: decoding while a model works."""

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
    """Yield the results in the order of the items; some of them are made before they are asked for.

    Those that wait, or are being made, together weigh at most ``ahead``, unless they are no more than ``threads``.
    Threads serve, since decoding and resampling release the interpreter's lock. An error is raised where its result
    would have come.
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
        # It must not wait: the garbage collector may end this generator in a thread of this very pool, or in one that
        # holds the locks of ``threading``.
        pool.shutdown(wait=False)
