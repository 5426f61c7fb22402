"""A function killed at the n-th change that it makes to the file system, in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

_CHANGES = {"os.link", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.symlink"}


def killed_at(change: int, work: Callable[[], object], *, below: str) -> bool:
    """Run ``work`` in a fork that is killed before its change number ``change``, from 0, to names below a folder.

    Returns:
        False if there were fewer changes: ``work`` was done then.
    """
    with warnings.catch_warnings():
        # The child makes no use of the threads that it lacks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _run(change, work, below)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the child ended with {status}"
    return killed


def _run(change: int, work: Callable[[], object], below: str) -> None:
    left = change

    def kill(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in _CHANGES and any(str(name).startswith(below) for name in arguments):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    status = 1
    try:
        sys.addaudithook(kill)
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - shown, and then the child ends
        traceback.print_exc()
    finally:
        os._exit(status)
