"""Child processes with a pipe to them, which workers of a DataLoader can have too."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from sharmill.engine.child import describe_exit, safe_path


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

    def end(self, seconds: float) -> None:
        """End the process by SIGTERM, and if it is left after ``seconds`` by SIGKILL; close the pipe."""
        self.terminate()
        self.join(seconds)
        self.kill()
        self.join(seconds)
        self.connection.close()
