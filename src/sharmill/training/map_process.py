"""Processes that call one function, each for one item at a time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import reprlib
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

from sharmill.errors import ConfigError, FatalError
from sharmill.processes import ChildEnded, ChildProcess

T = TypeVar("T")
R = TypeVar("R")


class WorkerProcesses(Generic[T, R]):
    """A function that is called in other processes, by as many threads as there are processes.

    The items and the results go as pickles through a pipe per process, so that nothing but the two ends can block: no
    queues, no threads between, no shared memory of tensors that is gone with its maker.
    """

    def __init__(self, fn: Callable[[T], R], num_workers: int) -> None:
        """Start the processes; they import what the function needs while this one goes on.

        Raises:
            ConfigError: this process may not have any.
            Exception: the function cannot be pickled.
        """
        if multiprocessing.current_process().daemon:
            raise ConfigError(
                "a worker process, as those of a DataLoader, may not start others: use kind='thread'",
                code="bad_config_value",
            )
        function = pickle.dumps(fn, pickle.HIGHEST_PROTOCOL)
        self._workers: list[ChildProcess] = []
        self._free: SimpleQueue[ChildProcess] = SimpleQueue()
        for _ in range(num_workers):
            self._workers.append(ChildProcess(_serve, function, name="sharmill-map"))
            self._free.put(self._workers[-1])

    def __call__(self, item: T) -> R:
        worker = self._free.get()
        try:
            worker.send(item)
            good, value, trace = worker.receive()
        except ChildEnded:
            worker.join()
            raise FatalError(
                f"a worker process of parallel_map {worker.describe_exit()}, at {_name(item)}", code="process_ended"
            ) from None
        finally:
            self._free.put(worker)
        if good:
            return value
        raise value from _RemoteTraceback(trace)

    def __enter__(self) -> WorkerProcesses[T, R]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the processes, which must be idle, and wait for them."""
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.join()


class _RemoteTraceback(Exception):
    """The traceback of an error in the other process, shown as the cause of the error here."""


def _name(item: object) -> str:
    return repr(getattr(item, "id", None)) if hasattr(item, "id") else reprlib.repr(item)


def _serve(connection: Connection, function: bytes) -> None:
    """Answer in the process until it is told to end."""
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
    """Make workers use one core each: OpenMP's threads wait for one another by spinning, so that they would collide."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # A new process imports the program's main module before this: then torch has read its environment already.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
