"""This process and others of its machine: identity, environment, threads, signals, age and end."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from os import _exit as end_at_once
from os import environ, getpid
from pathlib import Path
from signal import raise_signal
from signal import signal as set_handler
from socket import gethostname
from threading import Event, Thread

__all__ = [
    "Event",
    "Thread",
    "ThreadPoolExecutor",
    "end_at_once",
    "environ",
    "gethostname",
    "getpid",
    "interrupt",
    "is_gone",
    "raise_signal",
    "seconds_since_start",
    "set_handler",
    "state_and_start",
    "tell_to_end",
    "this_kernel",
]  # fmt: skip


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
