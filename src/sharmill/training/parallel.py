"""A function of every item of a stream, prefetched in threads or processes: in order, within bounds.

For what is too slow for the loop that uses it: decoding, resampling, features. Threads suffice for whatever works
without Python's lock (libsndfile, torch, numpy); processes are for the rest. Both work on the cuts of one reader, also
inside a shard.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar

from sharmill.errors import ConfigError
from sharmill.training.map_process import WorkerProcesses

T = TypeVar("T")
R = TypeVar("R")


def parallel_map(
    items: Iterable[T],
    fn: Callable[[T], R],
    num_workers: int = 2,
    *,
    kind: Literal["thread", "process"] = "thread",
    prefetch: int | None = None,
) -> ParallelMap[T, R]:
    """Return an iterable over ``fn`` of every item, in the order of the items; it may be iterated over again.

    A thread of its own reads the items, so that reading, working and using go on at the same time. An exception, of
    ``fn`` or of the items, is raised where its item would have come, after all before it; nothing comes after it. The
    workers end with the iteration, also where it is given up early.

    **State.** This keeps none, and that of the reader is up to ``prefetch`` items in front of what was delivered. Put
    ``sharmill.shar.reading.loading.ResumableDataset`` around the pipeline, or call ``mark_consumed`` of the reader with
    what came out: both count by the ``shar_position`` of the cuts, which ``fn`` must leave there.

    Args:
        items: cuts, or anything else.
        fn: changes nothing that other items use. For processes, it, the items and the results can be pickled; arrays of
            numpy travel faster than tensors.
        num_workers: threads or processes. Operations of torch that use all cores themselves gain nothing from either:
            with threads, ``torch.set_num_threads(1)`` first; processes do so.
        kind: ``process`` starts new ones for each iteration, which takes seconds where they import torch. Workers of a
            torch DataLoader may not have any: use threads there.
        prefetch: items that may be read and not yet delivered; by default 4 for each worker.

    Raises:
        FatalError: while iterating: a worker process ended.
        ConfigError: there is no worker, or fewer items may be ahead than there are workers, or another kind.

    Example:
        >>> list(parallel_map([1, 2, 3], str))
        ['1', '2', '3']
        >>> features = CutSet(parallel_map(open_shar("data"), add_features, 4))  # doctest: +SKIP
    """
    if kind not in ("thread", "process"):
        raise ConfigError(f"kind is {kind!r}: it is 'thread' or 'process'", code="bad_config_value")
    if num_workers < 1:
        raise ConfigError(f"num_workers is {num_workers}: there must be at least 1", code="bad_config_value")
    prefetch = 4 * num_workers if prefetch is None else prefetch
    if prefetch < num_workers:
        raise ConfigError(
            f"prefetch is {prefetch}, which leaves some of the {num_workers} workers without work",
            code="bad_config_value",
        )
    return ParallelMap(items, fn, num_workers, kind, prefetch)


class ParallelMap(Generic[T, R]):
    """The results of ``parallel_map``."""

    def __init__(self, items: Iterable[T], fn: Callable[[T], R], num_workers: int, kind: str, prefetch: int) -> None:
        self._items = items
        self._fn = fn
        self._num_workers = num_workers
        self._kind = kind
        self._prefetch = prefetch

    def __len__(self) -> int:
        """Return the number of items, if they have one."""
        return len(self._items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[R]:
        with ExitStack() as stack:
            # What is left open ends with the program, while there still are the modules that this takes.
            atexit.register(stack.close)
            stack.callback(atexit.unregister, stack.close)
            fn = self._fn
            if self._kind == "process":
                fn = stack.enter_context(WorkerProcesses(fn, self._num_workers))
            feeder = _Feeder(self._items, fn, self._num_workers, self._prefetch)
            stack.callback(feeder.stop)
            yield from feeder.results()


class _Feeder(Generic[T, R]):
    """The thread that reads items and hands them to the workers, as far ahead as it may."""

    def __init__(self, items: Iterable[T], fn: Callable[[T], R], num_threads: int, prefetch: int) -> None:
        self._items = items
        self._fn = fn
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="sharmill-map")
        self._room = threading.Semaphore(prefetch)
        self._stopped = threading.Event()
        # Results to be, in order; None at the end. The room bounds it.
        self._futures: SimpleQueue[Future[R] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._feed, name="sharmill-feed", daemon=True)
        self._thread.start()

    def results(self) -> Iterator[R]:
        while (future := self._futures.get()) is not None:
            result = future.result()
            # Delivered as soon as it is asked for: what the user holds is no longer ahead.
            self._room.release()
            yield result

    def stop(self) -> None:
        """End thread and workers; wait for what they are doing."""
        self._stopped.set()
        self._room.release()
        self._thread.join()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _feed(self) -> None:
        iterator: Iterator[T] | None = None
        try:
            iterator = iter(self._items)
            while self._wait_for_room():
                self._futures.put(self._executor.submit(self._fn, next(iterator)))
        except StopIteration:
            self._futures.put(None)
        except BaseException as error:  # noqa: BLE001  it is raised where the item would have come
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self._futures.put(failed)
        finally:
            # A generator is closed by the thread that runs it.
            if (close := getattr(iterator, "close", None)) is not None:
                close()

    def _wait_for_room(self) -> bool:
        self._room.acquire()
        return not self._stopped.is_set()
