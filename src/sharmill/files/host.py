"""This host and the processes on it: the user, usable cores, starts and ends of processes, and their signals."""

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

# Words before the number of the job that a process belongs to.
SLURM_JOB: Final = "SLURM job "
_own_cores: int | None = None
_PR_SET_PDEATHSIG: Final = 1


def user_name() -> str:
    """Return the name of the user of this process; the package itself gives one to a user without."""
    return getpass.getuser()


def limit_cores(number: int) -> None:
    """Have ``usable_cores`` return no more than this in this process, which shares its machine with other ranks."""
    global _own_cores
    _own_cores = number


def usable_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may use: by its affinity, the quotas of its control groups, and its share."""
    limits = group_limits("cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"], ["cpu.max"], proc, cgroups)
    most = min([len(os.sched_getaffinity(0)), *(quota / period for quota, period in limits if quota > 0)])
    return max(1, int(most if _own_cores is None else min(most, _own_cores)))


def group_limits(
    controller: str, files1: Sequence[str], files2: Sequence[str], proc: Path, cgroups: Path
) -> Iterator[tuple[int, int]]:
    """Yield the limit in each control group that this process is in, from the inside, and the number that goes with it.

    Args:
        controller: that of the groups of version 1, such as ``memory``.
        files1, files2: names of the files that have the two numbers, in groups of version 1 and of version 2.
    """
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = (cgroups / controller if controllers else cgroups) / path.lstrip("/")
        # In a container the path may be that outside of it; the root, which is last, is always its own.
        for group in [folder, *folder.parents][: len(Path(path).parts)]:
            # A group without a limit has other texts, and a group without the controller has no such file.
            with suppress(OSError, ValueError):
                texts = [(group / name).read_text() for name in (files1 if controllers else files2)]
                limit, other = map(int, " ".join(texts).split())
                yield limit, other


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
        with suppress(PermissionError):  # another user's
            os.kill(pid, 0)
        state, found = state_and_start(pid)
    except (ProcessLookupError, OverflowError):
        return True  # or no process can have such a number
    except OSError:
        return False  # hidden from this user, or just ended: the next look tells
    return started is not None and (state in "ZX" or found != started)


class Process(msgspec.Struct, kw_only=True):
    """A process as a file describes it to others.

    ``kernel`` says where ``pid`` means this process, and ``process_started`` tells it from a later one of that number.
    """

    host: str = "an unknown host"
    pid: int = 0
    user: str = "an unknown user"
    job: str = ""
    kernel: str = ""
    process_started: int | None = None

    @classmethod
    def this(cls, **values: Any) -> Self:
        """Return the record of this process, with further values of a subclass."""
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
        """True for a process under the same kernel as this, which may have ended."""
        return self.kernel == this_kernel()

    def is_known_dead(self) -> bool:
        """Return True if it was a process of this machine, and has ended."""
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
    """Interrupt this process as Ctrl-C does; in the background of a shell, where that is ignored, as SIGTERM does."""
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM if is_ignored else signal.SIGINT)


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Have an environment variable for as long as the context lasts."""
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
    """Have new Python processes look for modules in the current folder last, if at all: it may be a stranger's dataset.

    They, and all processes that they start, have PYTHONSAFEPATH in their environment.
    """
    return variable("PYTHONSAFEPATH", "1")


@contextmanager
def new_process(method: str) -> Iterator[ProcessPoolExecutor]:
    """Have a pool of one process, started by a method of multiprocessing, that ends with this process.

    Where an error ends the context, nobody waits for what the process does.
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
        parent: its process id where that is known: a parent that has ended by now is not missed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # For a child of a forkserver, this is the process that has started the server.
    starter = multiprocessing.parent_process()
    # The files of a starter with threads may be open for a moment longer than the parent lives.
    if (starter is not None and not starter.is_alive()) or parent not in (None, os.getppid()):
        os._exit(1)


def describe_exit(exitcode: int | None) -> str:
    """Return how a process ended, as the end of a sentence about it.

    >>> describe_exit(3), describe_exit(-9)
    ('ended with exit status 3', 'was ended by signal SIGKILL (as the kernel does when memory runs out)')
    """
    if exitcode is None or exitcode >= 0:
        return f"ended with exit status {exitcode}"
    # A real-time signal has a number alone.
    name = {one.value: one.name for one in signal.Signals}.get(-exitcode, -exitcode)
    hint = " (as the kernel does when memory runs out)" if -exitcode == signal.SIGKILL else ""
    return f"was ended by signal {name}{hint}"


class Terminated(KeyboardInterrupt):
    """The end of a process by SIGTERM: preemption, the end of its job, or a cancelled run.

    As with Ctrl-C, no attempt at a unit has failed.
    """


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Put off SIGINT and SIGTERM until the context ends; processes started in it never see a SIGINT.

    The handlers are exchanged because a signal may arrive in another thread, where no mask of this one holds it back;
    the mask is set because a started process inherits it.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread is ever interrupted.
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
        # Signals that wait behind the mask are delivered here, and remembered.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0])


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise ``Terminated`` in the main thread, once.

    Submitit takes no notice of the signal, so a cancelled job would go on until SIGKILL.
    """

    def end(number: int, frame: FrameType | None) -> None:
        # The way out is not to be interrupted.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
