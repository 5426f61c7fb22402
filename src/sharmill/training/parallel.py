"""A function of every item of a stream, prefetched in threads or processes: in order, within bounds.

For what is too slow for the loop that uses it: decoding, resampling, features. Threads suffice for whatever works
without Python's lock (libsndfile, torch, numpy); processes are for the rest. Both work on the cuts of one reader, also
inside a shard.
"""

from __future__ import annotations

import atexit
import os
import pickle
import reprlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar

from sharmill.errors import ConfigError, FatalError
from sharmill.training.child_process import ChildEnded, ChildProcess

T = TypeVar("T")
R = TypeVar("R")


def parallel_map(
    items: Iterable[T],
    fn: Callable[[T], R],
    num_workers: int = 2,
    *,
    kind: Literal["thread", "process"] = "thread",
    prefetch: int | None = None,
) -> _ParallelMap[T, R]:
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
        kind: ``process`` starts new ones for each iteration, which takes seconds where they import torch; each worker
            of a torch DataLoader has its own.
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
    if type(num_workers) is not int or num_workers < 1:
        raise ConfigError(f"num_workers is {num_workers!r}: a whole number, at least 1", code="bad_config_value")
    prefetch = 4 * num_workers if prefetch is None else prefetch
    if type(prefetch) is not int:
        raise ConfigError(f"prefetch is {prefetch!r}: it is a whole number", code="bad_config_value")
    if prefetch < num_workers:
        raise ConfigError(
            f"prefetch is {prefetch}, which leaves some of the {num_workers} workers without work",
            code="bad_config_value",
        )
    return _ParallelMap(items, fn, num_workers, kind, prefetch)


class _ParallelMap(Generic[T, R]):
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
                fn = stack.enter_context(_worker_processes(fn, self._num_workers))
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
            while self._room.acquire() and not self._stopped.is_set():
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


@contextmanager
def _worker_processes(fn: Callable[[T], R], num_workers: int) -> Iterator[Callable[[T], R]]:
    """A function that is called in other processes, by as many threads as there are processes.

    The items and the results go as pickles through a pipe per process, so that nothing but the two ends can block: no
    queues, no threads between, no shared memory of tensors that is gone with its maker. The processes import what the
    function needs while this one goes on; at the end, when they must be idle, they are waited for.

    Raises:
        Exception: the function cannot be pickled.
    """
    function = pickle.dumps(fn, pickle.HIGHEST_PROTOCOL)
    workers: list[ChildProcess] = []
    free: SimpleQueue[ChildProcess] = SimpleQueue()

    def call(item: T) -> R:
        worker = free.get()
        try:
            worker.send(item)
            good, value, trace = worker.receive()
        except ChildEnded as error:
            name = repr(item.id) if hasattr(item, "id") else reprlib.repr(item)
            raise FatalError(f"a worker process of parallel_map {error}, at {name}", code="process_ended") from None
        finally:
            free.put(worker)
        if good:
            return value
        raise value from _RemoteTraceback(trace)

    try:
        for _ in range(num_workers):
            workers.append(ChildProcess(_map_items, function, name="sharmill-map"))
            free.put(workers[-1])
        yield call
    finally:
        for worker in workers:
            with suppress(OSError):  # It may have ended already.
                # Closing alone is not enough: a process forked meanwhile has the pipe open as well.
                worker.connection.send_bytes(b"")
            worker.connection.close()
        for worker in workers:
            worker.join()


class _RemoteTraceback(Exception):
    """The traceback of an error in the other process, shown as the cause of the error here."""


def _map_items(connection: Connection, function: bytes) -> None:
    """Answer in the process until it is told to end."""
    # One core each: OpenMP's threads wait for one another by spinning, so that those of several workers would collide.
    os.environ["OMP_NUM_THREADS"] = "1"
    # A new process imports the program's main module before this: then torch has read its environment already.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    fn: Callable[[Any], Any] | None = None
    try:
        while question := connection.recv_bytes():
            try:
                # Here, since a module that cannot be imported is an error like any other.
                fn = pickle.loads(function) if fn is None else fn
                answer = pickle.dumps((True, fn(pickle.loads(question)), ""), pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the result would have come
                answer = _failure(error)
            connection.send_bytes(answer)
    except (EOFError, ConnectionError):
        return  # The parent died.


def _failure(error: Exception) -> bytes:
    trace = "\n" + "".join(traceback.format_exception(error))
    try:
        answer = pickle.dumps((False, error, trace), pickle.HIGHEST_PROTOCOL)
        pickle.loads(answer)
    except Exception:  # noqa: BLE001  many exceptions cannot be made again from their arguments
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}"), trace), pickle.HIGHEST_PROTOCOL)
    return answer
