"""Child processes that talk to this one over a pipe: start, send, receive, describe how one ended, end by force.

Also the user of a process, and the cores that it may use.
"""

from __future__ import annotations

import getpass
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

_SAFE_PATH: Final = "PYTHONSAFEPATH"
_own_cores: int | None = None


@contextmanager
def safe_path() -> Iterator[None]:
    """Have new Python processes look for modules in the current folder last, if at all: it may be a stranger's dataset.

    They, and all processes that they start, have PYTHONSAFEPATH in their environment.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def limit_cores(number: int) -> None:
    """Have ``usable_cores`` return no more than this in this process, which shares its machine with other ranks."""
    global _own_cores
    _own_cores = number


def usable_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may use: by its affinity, the quotas of its control groups, and its share."""
    most = min([float(len(os.sched_getaffinity(0))), *_cores_of_groups(proc, cgroups)])
    return max(1, int(most if _own_cores is None else min(most, _own_cores)))


def _cores_of_groups(proc: Path, cgroups: Path) -> Iterator[float]:
    for folder, version in control_groups("cpu", proc, cgroups):
        # Without a quota the texts are other, and a group without the controller has no such file.
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                yield int(quota) / int(period)


def control_groups(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each control group that this process is in, from the inside, and its version, 1 or 2.

    Args:
        controller: that of the groups of version 1, such as ``memory``.
    """
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = (cgroups / controller if controllers else cgroups) / path.lstrip("/")
        # In a container the path may be that outside of it; the root, which is last, is always its own.
        for group in [folder, *folder.parents][: len(Path(path).parts)]:
            yield group, 1 if controllers else 2


def user_name() -> str:
    """Return the name of the user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"  # without an entry in the list of users, as in containers


class ChildEnded(Exception):
    """The end of the pipe: the child has closed its side, as it does at the latest when it ends."""


class ChildProcess:
    """A new Python process, and the pipe to it.

    It is spawned, not forked from this process, which may have threads, and locks that they hold. Ctrl-C goes to every
    process of a terminal, but only this one is to answer it, so the child never sees a SIGINT.

    Args:
        target: is called in the child as ``target(connection, *args)``, and can be pickled. It reads messages with
            ``connection.recv()``, which raises EOFError once no more will come, and answers with ``connection.send``.
        args: can be pickled.
        name: of the process, for lists of processes.
        daemon: the child ends with this process.

    Raises:
        OSError: the process cannot be started.

    Attributes:
        connection: this end of the pipe.
    """

    def __init__(self, target: Callable[..., None], *args: Any, name: str, daemon: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        pipe = context.Pipe()
        self.connection: Connection = pipe[0]
        theirs = pipe[1]
        self._process: BaseProcess = context.Process(target=target, args=(theirs, *args), name=name, daemon=daemon)
        try:
            with safe_path():
                self._start(self._process)
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()

    def _start(self, process: BaseProcess) -> None:
        # A process inherits blocked signals. The tracker that multiprocessing starts beside it would unblock them.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # multiprocessing lets no daemon, such as a worker of a DataLoader, have children, since they might outlive it:
        # ours end with their pipe.
        this = multiprocessing.current_process()
        was_daemon = this.daemon
        try:
            if was_daemon:
                this.daemon = False
            process.start()
        finally:
            if was_daemon:
                this.daemon = True
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def handles(self) -> list[Any]:
        """The handles for ``multiprocessing.connection.wait``: one is ready where there is a message or an end."""
        return [self.connection, self._process.sentinel]

    @property
    def exitcode(self) -> int | None:
        """The exit status, or minus the number of a signal; None while the process runs."""
        return self._process.exitcode

    def is_alive(self) -> bool:
        """Return True while the process runs."""
        return self._process.is_alive()

    def send(self, message: Any) -> None:
        """Send an object, pickled as it is: tensors of torch too, which ``Connection.send`` would put in shared memory.

        Raises:
            ChildEnded: the child no longer reads.
            Exception: the message cannot be pickled; nothing was sent.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            self.connection.send_bytes(data)
        except OSError as error:
            raise ChildEnded(str(error)) from error

    def receive(self, timeout: float | None = None) -> Any:
        """Return the next message of the child; wait for it for ``timeout`` seconds, by default without limit.

        Raises:
            ChildEnded: there is none, and none will come.
            TimeoutError: there is none yet.
            Exception: it cannot be unpickled.
        """
        try:
            data = self.connection.recv_bytes() if self.connection.poll(timeout) else None
        except (EOFError, OSError) as error:
            raise ChildEnded(str(error)) from error
        if data is None:
            raise TimeoutError(f"no message after {timeout:g} seconds")
        return pickle.loads(data)

    def ask_to_end(self) -> None:
        """Tell the child that no more messages will come; its ``connection.recv()`` raises EOFError."""
        with suppress(OSError):  # It may have ended already.
            # Closing alone is not enough: a process forked meanwhile has the pipe open as well.
            self.connection.send_bytes(b"")
        self.connection.close()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, or for ``timeout`` seconds."""
        self._process.join(timeout)

    def describe_exit(self) -> str:
        """Return how the process ended; see ``describe_exit``."""
        return describe_exit(self.exitcode)


def join_all(children: Iterable[ChildProcess], seconds: float) -> None:
    """Wait until processes have ended, ``seconds`` in all."""
    deadline = time.monotonic() + seconds
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))


def end_by_force(children: Iterable[ChildProcess], seconds: float = 2.0) -> None:
    """End processes by SIGTERM, and those that are left after ``seconds`` by SIGKILL; close their pipes."""
    children = list(children)
    for child in children:
        child.terminate()
    join_all(children, seconds)
    for child in children:
        child.kill()
    join_all(children, seconds)
    for child in children:
        child.connection.close()


def describe_exit(exitcode: int | None) -> str:
    """Return how a process ended, as the end of a sentence about it.

    >>> describe_exit(3), describe_exit(-9)
    ('ended with exit status 3', 'was ended by signal SIGKILL (as the kernel does when memory runs out)')
    """
    if exitcode is None or exitcode >= 0:
        return f"ended with exit status {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:  # a real-time signal
        name = str(-exitcode)
    hint = " (as the kernel does when memory runs out)" if -exitcode == signal.SIGKILL else ""
    return f"was ended by signal {name}{hint}"


def state_and_start(pid: int) -> tuple[str, int]:
    """Return the state of a process as one letter, and the time of its start in clock ticks since the machine's.

    Raises:
        OSError: there is no such process, or it is hidden from this user.
    """
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


@cache
def this_kernel() -> str:
    """Return what tells the place of this process from all others: the boot of its kernel, and its PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def is_gone(pid: int, started: int | None = None) -> bool:
    """Return True if a process of this kernel has ended.

    Args:
        started: when it began, as ``state_and_start`` says; else a later process of its number is taken for it.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's
    if started is None:
        return False
    try:
        state, found = state_and_start(pid)
    except OSError:
        return False  # hidden from this user, or just ended: the next look tells
    return state in "ZX" or found != started


def seconds_since_start() -> float:
    """Return the age of this process, imports included."""
    _, started = state_and_start(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def interrupt() -> None:
    """Interrupt this process as Ctrl-C does; in the background of a shell, where that is ignored, as SIGTERM does."""
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM if is_ignored else signal.SIGINT)


def tell_to_end(pid: int) -> None:
    """Send SIGTERM to a process of this kernel.

    Raises:
        OSError: it has ended, or is another user's.
    """
    os.kill(pid, signal.SIGTERM)
