"""This host as a process sees it: its user, the cores that it may use, and other processes of the same kernel."""

from __future__ import annotations

import getpass
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

_own_cores: int | None = None


def user_name() -> str:
    """Return the name of the user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"  # without an entry in the list of users, as in containers


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
            # Without a limit the texts are other, and a group without the controller has no such file.
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
    except ProcessLookupError:
        return True
    except OSError:
        return False  # hidden from this user, or just ended: the next look tells
    return started is not None and (state in "ZX" or found != started)


def interrupt() -> None:
    """Interrupt this process as Ctrl-C does; in the background of a shell, where that is ignored, as SIGTERM does."""
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM if is_ignored else signal.SIGINT)
