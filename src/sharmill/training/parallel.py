"""Work in threads and child processes, which workers of a DataLoader can have too; no torch is imported for it.

``parallel_map`` applies a function to every item of a stream, ahead of use: in order, within bounds. It is for what is
too slow for the loop that uses it: decoding, resampling, features. Threads suffice for whatever works without Python's
lock (libsndfile, torch, numpy); processes are for the rest. Both work on the cuts of one reader, also inside a shard.
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
    """The end of a child before it sent a message; the text says how it ended, as ``describe_exit`` does."""


class ChildProcess(SpawnProcess):
    """A new Python process, which runs already, and the pipe to it.

    It is spawned. A fork would copy the locks that threads of this process hold. multiprocessing's forkserver fails in
    forked processes, such as workers of a DataLoader, which take the server of their parent for a child of their own.
    Ctrl-C goes to every process of a terminal, but only this one is to answer it, so the child never sees a SIGINT.

    Args:
        target: is called in the child as ``target(connection, *args)``, and can be pickled.
        args: can be pickled.
        name: of the process, for lists of processes.
        daemon: the child ends with this process.

    Raises:
        OSError: the process cannot be started.

    Attributes:
        connection: this end of the pipe.
    """

    def __init__(self, target: Callable[..., None], *args: Any, name: str, daemon: bool = True) -> None:
        ours, theirs = multiprocessing.Pipe()
        super().__init__(target=target, args=(theirs, *args), name=name, daemon=daemon)
        # A process inherits blocked signals. The tracker that multiprocessing starts beside it would unblock them.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # multiprocessing lets no daemon, such as a worker of a DataLoader, have children, since they might outlive it:
        # ours end with their pipe. The property is public, and this check alone reads it of the running process.
        this = multiprocessing.current_process()
        was_daemon, this.daemon = this.daemon, False
        try:
            with safe_path(), theirs:
                self.start()
        finally:
            this.daemon = was_daemon
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Only now, since the attributes that a process has at its start are pickled for the child.
        self.connection: Connection = ours

    def send(self, message: Any) -> None:
        """Send an object, pickled as it is: tensors of torch too, which ``Connection.send`` would put in shared memory.

        Nothing happens if the child has ended; ``receive`` raises the error.

        Raises:
            Exception: the message cannot be pickled; nothing was sent.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with suppress(OSError):
            self.connection.send_bytes(data)

    def receive(self, timeout: float | None = None) -> Any:
        """Return the next message of the child; wait for it for ``timeout`` seconds, by default without limit.

        Raises:
            ChildEnded: there is none, and the child has ended.
            TimeoutError: there is none yet.
            Exception: it cannot be unpickled.
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
    refuse((kind not in ("thread", "process"), f"kind is {kind!r}: it is 'thread' or 'process'"))
    at_least(1, "num_workers", num_workers)
    # Fewer would leave some of the workers without work.
    prefetch = at_least(num_workers, "prefetch", 4 * num_workers if prefetch is None else prefetch)
    return _ParallelMap(items, fn, num_workers, kind, prefetch)


def at_least(least: int, name: str, value: int) -> int:
    """Return a whole number, which may be NumPy's; raise ConfigError for anything else, and for a smaller one."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}: it is a whole number of at least {least}", code="bad_config_value")
    return value


@dataclass(frozen=True)
class _ParallelMap(Generic[T, R]):
    """The results of ``parallel_map``."""

    items: Iterable[T]
    fn: Callable[[T], R]
    num_workers: int
    kind: str
    prefetch: int

    def __len__(self) -> int:
        """Return the number of items, if they have one."""
        return len(self.items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[R]:
        with ExitStack() as stack:
            # An iteration that is left open ends with the program, while the modules that it needs are still there.
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
                # Delivered as soon as it is asked for: what the user holds is no longer ahead.
                ahead.append(reader.submit(start_next))
                yield result


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
        raise value from RemoteTraceback(trace)

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


def _map_items(connection: Connection, function: bytes) -> None:
    """Answer in the process until it is told to end."""
    # One core each: OpenMP's threads wait for one another by spinning, so that those of several workers would collide.
    os.environ["OMP_NUM_THREADS"] = "1"
    # A new process imports the program's main module before this: then torch has read its environment already.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    fn: Callable[[Any], Any] | None = None
    with suppress(EOFError, ConnectionError):  # The parent died.
        while question := connection.recv_bytes():
            try:
                # Here, since a module that cannot be imported is an error like any other.
                fn = pickle.loads(function) if fn is None else fn
                answer = pickle.dumps((True, fn(pickle.loads(question)), ""), pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the result would have come
                answer = pickle.dumps((False, *portable(error)), pickle.HIGHEST_PROTOCOL)
            connection.send_bytes(answer)
