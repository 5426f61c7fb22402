"""A process from which others are forked, which share its imports."""

from __future__ import annotations

import ctypes
import errno
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from sharmill.errors import SharmillError
from sharmill.processes import ChildEnded, ChildProcess, end_by_force, safe_path

_PR_SET_PDEATHSIG: Final = 1
_SECONDS_BETWEEN_LOOKS: Final = 0.5
_SECONDS_TO_END: Final = 2.0
# It is open in a process that computes with CUDA, and not in one that only counts GPUs.
_CUDA_FILE: Final = "/dev/nvidia-uvm"


class ForkServer:
    """A child process that imports modules and forks others, which so share one import and its memory.

    It runs nothing but imports, in one thread of Python (libraries leave threads of their own, which hold none of
    Python's locks): what it forks finds no such lock held and no GPU in use. Where an import uses CUDA all the same,
    which does not work in a forked process, the others are spawned. A module that cannot be imported is left out, so
    that whoever needs it meets the error. Its children end with it.

    Args:
        modules: their names.
        setup: called before the imports; can be pickled.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, modules: Sequence[str], setup: Callable[[], None]) -> None:
        self._child = ChildProcess(_serve, tuple(modules), setup, name="sharmill-fork-server", daemon=False)
        self._has_imported = False

    def is_alive(self) -> bool:
        """Return True while others can be forked."""
        return self._child.is_alive()

    def await_imports(self) -> None:
        """Wait until the imports are done.

        Raises:
            OSError: the server has ended.
            SharmillError: what ``setup`` has raised.
        """
        if not self._has_imported:
            answer = self._receive()
            if isinstance(answer, SharmillError):
                raise answer
            self._has_imported = True

    def fork(self, target: Callable[..., None], theirs: Connection, args: Sequence[Any], name: str) -> Forked:
        """Have a process forked that calls ``target(theirs, *args)``, as soon as the imports are done.

        Raises:
            OSError: the process cannot be started, or the server has ended.
        """
        self.await_imports()
        ours, status = multiprocessing.Pipe(duplex=False)
        try:
            with socket.socket(fileno=os.dup(self._child.connection.fileno())) as pipe:
                self._child.send((target, tuple(args), name))
                socket.send_fds(pipe, [b"."], [theirs.fileno(), status.fileno()])
            started = self._receive()
            if isinstance(started, OSError):
                raise started
        except ChildEnded:
            ours.close()
            raise self._ended() from None
        except BaseException:
            ours.close()
            raise
        finally:
            status.close()
        return Forked(started, ours, self._child)

    def end(self) -> None:
        """End the server by force, and with it what it has forked."""
        end_by_force([self._child])

    def _receive(self) -> Any:
        # A process that it has started may hold its pipe open.
        wait(self._child.handles)
        try:
            return self._child.receive(0.0)
        except (ChildEnded, TimeoutError):
            raise self._ended() from None

    def _ended(self) -> OSError:
        self._child.join(_SECONDS_TO_END)
        return OSError(f"the process that makes its imports {self._child.describe_exit()}")


class Forked:
    """A process that a ``ForkServer`` has started, with the methods of multiprocessing's."""

    def __init__(self, pid: int, status: Connection, server: ChildProcess) -> None:
        self._pid = pid
        self._status = status
        self._server = server
        self._exitcode: int | None = None

    @property
    def sentinel(self) -> Connection:
        return self._status

    @property
    def exitcode(self) -> int | None:
        if self._exitcode is None:
            # Asked first: what a dead server has told is then all there.
            is_served = self._server.is_alive()
            try:
                if self._status.poll():
                    self._exitcode = self._status.recv()
                elif not is_served:
                    self._exitcode = -signal.SIGKILL  # it has ended with the server
            except (EOFError, OSError):
                self._exitcode = -signal.SIGKILL
        return self._exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive():
            left = _SECONDS_BETWEEN_LOOKS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return
            wait([self._status], min(left, _SECONDS_BETWEEN_LOOKS))

    def terminate(self) -> None:
        self._send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: int) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)


def _serve(connection: Connection, modules: Sequence[str], setup: Callable[[], None]) -> None:
    """Run a fork server: import modules, tell that it is done, and fork a process for each request."""
    _end_with_parent()
    try:
        setup()
    except SharmillError as error:
        connection.send(error)
        os._exit(1)
    for module in modules:
        # The process that needs it meets the same error, and reports it.
        with suppress(Exception, SystemExit):
            importlib.import_module(module)
    connection.send(True)
    try:
        _answer_requests(connection)
    except EOFError:  # no more will come
        os._exit(0)
    except BaseException:  # noqa: BLE001 - an end like that of other processes would wait for all that were forked
        traceback.print_exc()
        os._exit(1)


def _answer_requests(connection: Connection) -> None:
    """Answer each request with the number of a new process, or with the error; tell of the end of each process."""
    context = multiprocessing.get_context("fork" if _may_fork() else "spawn")
    pipe = socket.socket(fileno=os.dup(connection.fileno()))
    running: list[tuple[BaseProcess, Connection]] = []
    while True:
        # The end of a process shows at once, unless one that it started holds its sentinel open.
        ready = wait([connection, *(process.sentinel for process, _ in running)], _SECONDS_BETWEEN_LOOKS)
        for process, status in [one for one in running if one[0].exitcode is not None]:
            running.remove((process, status))
            # Nobody may wait for it any more.
            with suppress(OSError), status:
                status.send(process.exitcode)
        if connection not in ready:
            continue
        target, args, name = connection.recv()
        _, received, _, _ = socket.recv_fds(pipe, 1, 2)
        pipes = [Connection(number) for number in received]
        try:
            if len(pipes) < 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            theirs, status = pipes
            process = context.Process(target=_work, args=(target, theirs, args), name=name)  # type: ignore[attr-defined]
            with safe_path():
                process.start()
        except OSError as error:
            for one in pipes:
                one.close()
            connection.send(error)
        else:
            theirs.close()
            running.append((process, status))
            connection.send(process.pid)


def _work(target: Callable[..., None], theirs: Connection, args: Sequence[Any]) -> None:
    """Run a process that a server has started."""
    _end_with_parent()
    target(theirs, *args)


def _may_fork() -> bool:
    """Return True if what is forked from this process can do all that a new one can."""
    if sys.platform != "linux":
        return False
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder itself, which was open
            if str(file.readlink()) == _CUDA_FILE:
                return False
    return True


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, even in the middle of native code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
