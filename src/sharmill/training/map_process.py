"""Processes that call one function for whoever asks, each for one item at a time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import reprlib
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

from sharmill.errors import ConfigError, FatalError

T = TypeVar("T")
R = TypeVar("R")

_END = b""


class WorkerProcesses(Generic[T, R]):
    """A function as processes: called by as many threads as there are processes, each call is made in one of them.

    The items and the results go as pickles through a pipe per process, so that nothing but the two ends can block: no
    queues, no threads between, no shared memory of tensors that is gone with its maker.
    """

    def __init__(self, fn: Callable[[T], R], num_workers: int) -> None:
        """Starts the processes; they import what the function needs while this one goes on.

        Raises:
            ConfigError: this process may not have any.
            Exception: the function cannot be pickled.
        """
        if multiprocessing.current_process().daemon:
            raise ConfigError("a worker process, as those of a DataLoader, may not start others: use kind='thread'")
        function = pickle.dumps(fn, pickle.HIGHEST_PROTOCOL)
        self._workers: list[_Worker] = []
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(num_workers):
            self._workers.append(_Worker(function))
            self._free.put(self._workers[-1])

    def __call__(self, item: T) -> R:
        worker = self._free.get()
        try:
            return worker.call(item)
        finally:
            self._free.put(worker)

    def __enter__(self) -> WorkerProcesses[T, R]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends the processes, which must be idle, and waits for them."""
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.join()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, function: bytes) -> None:
        # Not forked: this process has threads, and locks that they hold.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function), name="sharmill-map", daemon=True)
        # Ctrl-C goes to every process of a terminal, but only this one is to answer it. What is blocked stays so in a
        # process that is started; the tracker that multiprocessing starts beside it would unblock it.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def call(self, item: Any) -> Any:
        question = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        try:
            self._connection.send_bytes(question)
            answer = self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            raise FatalError(f"a worker process of parallel_map ended {self._end()}, at {_name(item)}") from None
        good, value, trace = pickle.loads(answer)
        if good:
            return value
        raise value from _RemoteTraceback(trace)

    def _end(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"

    def ask_to_end(self) -> None:
        try:
            # Closing alone is not enough: a process forked meanwhile has the pipe open as well.
            self._connection.send_bytes(_END)
        except ConnectionError:
            pass  # It is dead already.
        self._connection.close()

    def join(self) -> None:
        self._process.join()


class _RemoteTraceback(Exception):
    """Shown as the cause of an error: where it came from in the other process."""


def _name(item: object) -> str:
    return repr(getattr(item, "id", None)) if hasattr(item, "id") else reprlib.repr(item)


def _serve(connection: Connection, function: bytes) -> None:
    """The process: answers until it is told to end."""
    _use_one_thread()
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


def _use_one_thread() -> None:
    """Workers that each use all cores are in each other's way: OpenMP's threads wait for one another by spinning."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # A new process imports the program's main module before this: then torch has read its environment already.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
