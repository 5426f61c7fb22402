"""Waiting until this node sees what another has written: on NFS that takes up to a minute.

A client of NFS keeps names, listings and attributes for a while (acregmin, acdirmin), and meanwhile takes what is new
for absent. So a name that is missing does not mean that the file is not there, where another process is known to have
made it. What a process has seen once, or made, it goes on seeing: if that is missing later, it is gone.

Waiting ends with what is waited for, and after ``executor.seconds_until_seen``. The server decides at once whether a
name may be made, whatever this node sees.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
# Answers about files that another node has made or replaced, and that this one does not see as they are.
_LATE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


class Patience:
    """Waits for what other nodes had written when this was made; ``seconds`` in all, however often it is asked."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def wait_until(self, is_seen: Callable[[], bool], what: str) -> bool:
        """Wait until a condition holds; return False, and say in the log what is missing, where time is over."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                if is_seen():
                    return True
            except OSError as error:
                if error.errno not in _LATE:
                    raise
            if not self._pause(pause):
                log.warning("%s cannot be seen here, after %g s of waiting for a shared disk", what, self._seconds)
                return False
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def outlasts(self, error: OSError) -> bool:
        """Return True, after a pause, where an error may be that a file is not seen yet: then try again."""
        if error.errno not in _LATE or not self._pause(_LONGEST_PAUSE_SECONDS):
            return False
        log.info("tried again, since a shared disk may show it late: %s", error)
        return True

    def once_seen(self, work: Callable[[], Result]) -> Result:
        """Return what a function returns, which is called again where it may have met files as they were before."""
        while True:
            try:
                return work()
            except OSError as error:
                if not self.outlasts(error):
                    raise

    def _pause(self, seconds: float) -> bool:
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(seconds, left))
        return True
