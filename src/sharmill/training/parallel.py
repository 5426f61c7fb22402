"""Parallel processing in threads and child processes, which also works inside workers of a DataLoader.

``parallel_map`` applies a function to every item of a stream in order, with bounded prefetching. It is meant for work
that is too slow for the consuming loop, such as decoding, resampling and feature extraction. Threads suffice for code
that releases Python's GIL (libsndfile, torch, numpy); other code needs processes. This module does not import torch.
"""

import atexit
import multiprocessing
import os
import pickle
import reprlib
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from numbers import Integral
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar

from sharmill.errors import ConfigError, FatalError, refuse
from sharmill.files.host import describe_exit, safe_path
from sharmill.files.messages import RemoteTraceback, portable

T = TypeVar("T")
R = TypeVar("R")


class ChildEnded(Exception):
    """Raised if a child process ends before it sends a message; the error's text comes from ``describe_exit``."""


class ChildProcess(SpawnProcess):
    """A child process that starts on construction and communicates with its parent through a pipe.

    The process is spawned. A fork would copy locks that threads of this process hold. multiprocessing's forkserver
    fails in forked processes, such as workers of a DataLoader, because these mistake their parent's server for their
    own child. Ctrl-C reaches every process of a terminal, but only the parent should handle it, so the child blocks
    SIGINT.

    Args:
        target: called in the child as ``target(connection, *args)``; must be picklable.
        args: must be picklable.
        name: name of the process, for debugging.
        daemon: whether the child is terminated when this process exits.

    Raises:
        OSError: the process cannot be started.

    Attributes:
        connection: the parent's end of the pipe.
    """

    def __init__(self, target: Callable[..., None], *args: Any, name: str, daemon: bool = True) -> None:
        ours, theirs = multiprocessing.Pipe()
        super().__init__(target=target, args=(theirs, *args), name=name, daemon=daemon)
        # The child inherits the blocked SIGINT. Starting multiprocessing's resource tracker would unblock it, so the
        # tracker is started first.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # multiprocessing forbids children of daemons, such as workers of a DataLoader, because the children might
        # outlive them. The check is bypassed, since these children end when their pipe is closed. Nothing else reads
        # the ``daemon`` property of the current process.
        this = multiprocessing.current_process()
        was_daemon, this.daemon = this.daemon, False
        try:
            with safe_path(), theirs:
                self.start()
        finally:
            this.daemon = was_daemon
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # This attribute is set after the start, because attributes that exist at the start are pickled for the child.
        self.connection: Connection = ours

    def send(self, message: Any) -> None:
        """Pickle an object, and send it to the child.

        Torch tensors are pickled too, whereas ``Connection.send`` would move them to shared memory. If the child has
        ended, nothing is sent, and the next ``receive`` raises the error.

        Raises:
            Exception: the message cannot be pickled; nothing was sent.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with suppress(OSError):
            self.connection.send_bytes(data)

    def receive(self, timeout: float | None = None) -> Any:
        """Return the child's next message, waiting up to ``timeout`` seconds or, by default, indefinitely.

        Raises:
            ChildEnded: the child ended without sending another message.
            TimeoutError: no message arrived in time.
            Exception: the message cannot be unpickled.
        """
        try:
            data = self.connection.recv_bytes() if self.connection.poll(timeout) else None
        except (EOFError, OSError) as error:
            self.join()
            raise ChildEnded(describe_exit(self.exitcode)) from error
        if data is None:
            raise TimeoutError
        return pickle.loads(data)


def parallel_map(
    items: Iterable[T],
    fn: Callable[[T], R],
    num_workers: int = 2,
    *,
    kind: Literal["thread", "process"] = "thread",
    prefetch: int | None = None,
) -> "_ParallelMap[T, R]":
    """Return an iterable over ``fn(item)`` for every item, in order; it can be iterated over repeatedly.

    A separate thread reads the items, so reading, processing and consuming overlap. An exception from ``fn`` or from
    the items is raised in the place of its result, after all earlier results, and ends the iteration. The workers end
    with the iteration, even if it is abandoned early.

    **State.** The map itself has no state to save, and the reader of the items is up to ``prefetch`` items ahead of the
    delivered results. Wrap the pipeline in ``sharmill.shar.reading.loading.ResumableDataset``, or pass results to the
    reader's ``mark_consumed``. Both rely on the ``shar_position`` of the cuts, which ``fn`` must preserve.

    Args:
        items: cuts, or any other items.
        fn: function that is applied to one item at a time; a call must not affect other items. For processes, the
            function, the items and the results must be picklable; numpy arrays are transferred faster than tensors.
        num_workers: number of threads or processes. Torch operations that use all cores gain nothing from more workers.
            Before using threads, call ``torch.set_num_threads(1)``; processes do this themselves.
        kind: ``process`` starts new processes for each iteration, which takes seconds if they import torch. Each worker
            of a torch DataLoader starts its own processes.
        prefetch: maximum number of items that are read but not yet delivered; by default 4 per worker.

    Raises:
        FatalError: a worker process ended during the iteration.
        ConfigError: ``num_workers`` is below 1, ``prefetch`` is below ``num_workers``, or ``kind`` is unknown.

    Example:
        >>> list(parallel_map([1, 2, 3], str))
        ['1', '2', '3']
        >>> features = CutSet(parallel_map(open_shar("data"), add_features, 4))  # doctest: +SKIP
    """
    refuse((kind not in ("thread", "process"), f"kind is {kind!r}: it must be 'thread' or 'process'"))
    at_least(1, "num_workers", num_workers)
    # A smaller value would leave some workers idle.
    prefetch = at_least(num_workers, "prefetch", 4 * num_workers if prefetch is None else prefetch)
    return _ParallelMap(items, fn, num_workers, kind, prefetch)


def at_least(least: int, name: str, value: int) -> int:
    """Return ``value``; raise ConfigError unless it is an integer (Python or NumPy) of at least ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}: it must be an integer of at least {least}", code="bad_config_value")
    return value


@dataclass(frozen=True)
class _ParallelMap(Generic[T, R]):
    """Iterable over the results of ``parallel_map``."""

    items: Iterable[T]
    fn: Callable[[T], R]
    num_workers: int
    kind: str
    prefetch: int

    def __len__(self) -> int:
        """Return the number of items; raise TypeError if ``items`` has no length."""
        return len(self.items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[R]:
        with ExitStack() as stack:
            # An unfinished iteration must end before Python's shutdown removes the modules that it needs.
            atexit.register(stack.close)
            stack.callback(atexit.unregister, stack.close)
            fn = self.fn
            if self.kind == "process":
                fn = stack.enter_context(_worker_processes(fn, self.num_workers))
            items = iter(self.items)
            if isinstance(items, Generator):
                stack.callback(items.close)
            workers = ThreadPoolExecutor(self.num_workers, thread_name_prefix="sharmill-map")
            stack.callback(workers.shutdown, cancel_futures=True)
            reader = ThreadPoolExecutor(1, thread_name_prefix="sharmill-read")
            stack.callback(reader.shutdown, cancel_futures=True)

            def start_next() -> Future[R] | None:
                for item in items:
                    return workers.submit(fn, item)
                return None

            ahead = deque(reader.submit(start_next) for _ in range(self.prefetch))
            while (future := ahead.popleft().result()) is not None:
                result = future.result()
                # A result counts as delivered once it is requested, so the next read starts before the yield.
                ahead.append(reader.submit(start_next))
                yield result


@contextmanager
def _worker_processes(fn: Callable[[T], R], num_workers: int) -> Iterator[Callable[[T], R]]:
    """Yield a wrapper that calls ``fn`` in worker processes; up to ``num_workers`` threads may call it at once.

    Items and results are pickled and sent through one pipe per process. Thus no queue or intermediate thread can block,
    and no tensor in shared memory disappears with the process that created it. The processes import the function's
    modules in the background. All processes must be idle when the context exits; exiting waits for them to end.

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
            raise FatalError(
                f"a worker process of parallel_map {error} while it processed {name}", code="process_ended"
            ) from None
        finally:
            free.put(worker)
        if good:
            return value
        raise value from RemoteTraceback(trace)

    try:
        for _ in range(num_workers):
            workers.append(ChildProcess(_map_items, function, name="sharmill-map"))
            free.put(workers[-1])
        yield call
    finally:
        for worker in workers:
            with suppress(OSError):  # the process may have ended already
                # Closing the pipe would not end the worker if a process forked in the meantime also holds the pipe
                # open.
                worker.connection.send_bytes(b"")
            worker.connection.close()
        for worker in workers:
            worker.join()


def _map_items(connection: Connection, function: bytes) -> None:
    """Process items in a worker process until an empty message arrives."""
    # OpenMP threads spin while they wait, so the threads of several workers would slow each other down.
    os.environ["OMP_NUM_THREADS"] = "1"
    # If torch is already imported, for example by the program's main module, it no longer reads the environment.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    fn: Callable[[Any], Any] | None = None
    with suppress(EOFError, ConnectionError):  # the parent died
        while request := connection.recv_bytes():
            try:
                # Unpickled inside the try block, so that a failing import is reported like any other error.
                fn = pickle.loads(function) if fn is None else fn
                reply = pickle.dumps((True, fn(pickle.loads(request)), ""), pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # noqa: BLE001  any error is raised in the place of its result
                reply = pickle.dumps((False, *portable(error)), pickle.HIGHEST_PROTOCOL)
            connection.send_bytes(reply)
