"""Results of a function in worker processes, in order, with few items in memory at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from typing import Any, Final, TypeVar

from sharmill.engine.child import safe_path
from sharmill.errors import FatalError

Item = TypeVar("Item")
Result = TypeVar("Result")
_PRELOADED: Final = ["sharmill.collect.complete"]
_ITEMS_PER_WORKER: Final = 2


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yield the results of a function in the order of the items.

    Workers are forked from a process that has made the imports, and started as they are needed. They end when the
    generator is closed, as soon as their items are done, and when this process ends.

    Args:
        function: can be pickled.
        workers: processes beside this one; 0 to do all in this one.

    Raises:
        FatalError: a worker was killed.
    """
    if workers == 0:
        yield from map(function, items)
        return
    with safe_path():
        multiprocessing.set_forkserver_preload(_PRELOADED)
        forkserver.ensure_running()
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("forkserver"), _start, (function,))
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(_call, item))
            if len(pending) > _ITEMS_PER_WORKER * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise FatalError(
            "a worker process was killed, as the kernel does when memory runs out; run the same command again, with "
            "fewer --workers or more memory",
            code="process_ended",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# What a worker calls.
_function: Callable[[Any], Any]


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    # Ctrl-C goes to all processes of a terminal, and is for the first one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker of a pool does not notice that the first process was killed.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(item: Any) -> Any:
    return _function(item)
