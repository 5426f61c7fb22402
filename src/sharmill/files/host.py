"""This host and its processes: the user, usable cores, the start and end of processes, and signals."""

import ctypes
import getpass
import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

import msgspec

# Text before the number of a SLURM job in ``Process.job``.
SLURM_JOB: Final = "SLURM job "
_own_cores: int | None = None
_PR_SET_PDEATHSIG: Final = 1


def user_name() -> str:
    """Return this process's user name; sharmill sets one on import for users without an entry in the user database."""
    return getpass.getuser()


def limit_cores(number: int) -> None:
    """Limit the result of ``usable_cores`` in this process, which shares its machine with other ranks."""
    global _own_cores
    _own_cores = number


def usable_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use, given its affinity, cgroup quotas and ``limit_cores``."""
    limits = group_limits("cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"], ["cpu.max"], proc, cgroups)
    most = min([len(os.sched_getaffinity(0)), *(quota / period for quota, period in limits if quota > 0)])
    return max(1, int(most if _own_cores is None else min(most, _own_cores)))


def group_limits(
    controller: str, files1: Sequence[str], files2: Sequence[str], proc: Path, cgroups: Path
) -> Iterator[tuple[int, int]]:
    """Yield (limit, other number) for each control group of this process, from the innermost to the outermost.

    Args:
        controller: controller of version 1 groups, such as ``memory``.
        files1, files2: names of the files that contain the two numbers, for groups of version 1 and version 2.
    """
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = (cgroups / controller if controllers else cgroups) / path.lstrip("/")
        # In a container, the path may be valid only outside of it; the last folder, the root, always belongs to the
        # container.
        for group in [folder, *folder.parents][: len(Path(path).parts)]:
            # A group without a limit contains other text, and a group without the controller has no such file.
            with suppress(OSError, ValueError):
                texts = [(group / name).read_text() for name in (files1 if controllers else files2)]
                limit, other = map(int, " ".join(texts).split())
                yield limit, other


def state_and_start(pid: int) -> tuple[str, int]:
    """Return a process's state as one letter, and its start time in clock ticks since boot.

    Raises:
        OSError: the process does not exist, or is hidden from this user.
    """
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


@cache
def this_kernel() -> str:
    """Return an identifier of this kernel boot and PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def is_gone(pid: int, started: int | None = None) -> bool:
    """Return True if a process of this kernel has ended.

    Args:
        started: its start time from ``state_and_start``; if None, a later process with the same number counts as alive.
    """
    try:
        with suppress(PermissionError):  # it belongs to another user
            os.kill(pid, 0)
        state, found = state_and_start(pid)
    except (ProcessLookupError, OverflowError):
        return True  # it does not exist, or the number is out of range
    except OSError:
        return False  # hidden from this user, or just ended; the next check will show
    return started is not None and (state in "ZX" or found != started)


class Process(msgspec.Struct, kw_only=True):
    """A process, as recorded in a file for other processes.

    ``kernel`` identifies the kernel under which ``pid`` is valid, and ``process_started`` distinguishes the process
    from a later one with the same number.
    """

    host: str = "an unknown host"
    pid: int = 0
    user: str = "an unknown user"
    job: str = ""
    kernel: str = ""
    process_started: int | None = None

    @classmethod
    def this(cls, **values: Any) -> Self:
        """Return the record of this process, with additional values for a subclass."""
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            pid=pid,
            user=user_name(),
            job=_name_job(),
            kernel=this_kernel(),
            process_started=state_and_start(pid)[1],
            **values,
        )

    @property
    def is_here(self) -> bool:
        """True if the process runs or ran under the same kernel as this one."""
        return self.kernel == this_kernel()

    def is_known_dead(self) -> bool:
        """Return True if the process ran on this machine and has ended."""
        return self.is_here and is_gone(self.pid, self.process_started)

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        return f"process {self.pid} of {self.user} on {self.host}{job}"


def _name_job() -> str:
    if "SLURM_JOB_ID" in os.environ:
        return SLURM_JOB + os.environ["SLURM_JOB_ID"]
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        metadata = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"]).get("metadata", {})
        return f"Ray job {metadata.get('job_submission_id')}"
    return ""


def interrupt() -> None:
    """Interrupt this process as Ctrl-C does, or with SIGTERM if SIGINT is ignored, as in a shell's background job."""
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM if is_ignored else signal.SIGINT)


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the duration of the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def safe_path() -> AbstractContextManager[None]:
    """Prevent new Python processes from importing modules from the current folder, which may contain untrusted files.

    They and all their child processes inherit PYTHONSAFEPATH.
    """
    return variable("PYTHONSAFEPATH", "1")


@contextmanager
def new_process(method: str) -> Iterator[ProcessPoolExecutor]:
    """Provide a pool with one process, which is started with a multiprocessing method and ends with this process.

    If an error ends the context, the process is not waited for.
    """
    with safe_path():
        pool = ProcessPoolExecutor(1, multiprocessing.get_context(method), end_with_parent)
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, even in the middle of native code.

    Args:
        parent: process id of the parent if known, so that a parent that has already ended is noticed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # For a child of a forkserver, this is the process that started the server.
    starter = multiprocessing.parent_process()
    # A starter with threads may keep its files open for a moment after it has ended, so its process id is checked too.
    if (starter is not None and not starter.is_alive()) or parent not in (None, os.getppid()):
        os._exit(1)


def describe_exit(exitcode: int | None) -> str:
    """Return the end of a sentence about how a process ended.

    >>> describe_exit(3), describe_exit(-9)
    ('ended with exit status 3', 'was ended by signal SIGKILL (as the kernel does when memory runs out)')
    """
    if exitcode is None or exitcode >= 0:
        return f"ended with exit status {exitcode}"
    # Real-time signals have no name.
    name = {one.value: one.name for one in signal.Signals}.get(-exitcode, -exitcode)
    hint = " (as the kernel does when memory runs out)" if -exitcode == signal.SIGKILL else ""
    return f"was ended by signal {name}{hint}"


class Terminated(KeyboardInterrupt):
    """Raised when SIGTERM ends this process: after preemption, at the end of its job, or in a cancelled run.

    As with Ctrl-C, this does not count as a failed attempt at a unit.
    """


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the context ends; processes started inside never receive SIGINT.

    The handlers are replaced because a signal may arrive in another thread, where this thread's mask does not block it.
    The mask is set because started processes inherit it.
    """
    if threading.current_thread() is not threading.main_thread():
        # Signals interrupt only the main thread, so there is nothing to defer here.
        yield
        return
    arrived: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        # Signals blocked by the mask are delivered here and recorded.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0])


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise ``Terminated`` in the main thread, once.

    Submitit ignores the signal, so a cancelled job would otherwise run until SIGKILL.
    """

    def end(number: int, frame: FrameType | None) -> None:
        # A second signal must not interrupt the cleanup.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
