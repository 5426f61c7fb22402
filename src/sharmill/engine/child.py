"""New processes: their environment and safe path of modules, their end with their parent, and how one ended."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


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


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even in the middle of native code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Of a forked server's child, that is the process which has started the server.
    starter = multiprocessing.parent_process()
    if starter is not None and not starter.is_alive():
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
