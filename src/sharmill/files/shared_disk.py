"""Shared disks (NFS): what other nodes wrote is visible here only after a while, and clocks differ.

An NFS client keeps names, listings and attributes for up to a minute (acregmin, acdirmin), and takes new files for
missing meanwhile. So a missing name does not mean that the file is missing, if another process is known to have made
it: ``VisibilityTimeout`` waits for it, at most for ``executor.seconds_until_seen``. A process goes on seeing all that
it has seen once, or made. The server decides at once if a name may be made, whatever this node sees.
"""

import errno
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tenacity import Retrying, retry_if_exception, wait_exponential

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# Errors of files that another node has made or replaced, and that this node does not see yet.
_NOT_YET_VISIBLE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


class VisibilityTimeout:
    """Waits until this node sees what others had written when this was made; ``seconds`` in all, over all calls."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def retry_until_visible(self, work: Callable[[], Result]) -> Result:
        """Call a function again while it raises errors of files that may not be visible yet; return its result."""
        retrying = Retrying(
            retry=retry_if_exception(lambda error: getattr(error, "errno", None) in _NOT_YET_VISIBLE_ERRNOS),
            stop=lambda state: time.monotonic() >= self._deadline,
            wait=wait_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        return retrying(work)

    def wait_until(self, is_seen: Callable[[], bool], what: str) -> bool:
        """Wait until a condition holds; if time runs out, log what is missing and return False."""

        def look() -> None:
            if not is_seen():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), what)

        try:
            self.retry_until_visible(look)
        except OSError as error:
            if error.errno not in _NOT_YET_VISIBLE_ERRNOS:
                raise
            log.warning("%s cannot be seen here, after %g s of waiting for a shared disk", what, self._seconds)
            return False
        return True


def time_of_folder(folder: Path) -> float:
    """Return the time of the file system that a folder is on, in Unix seconds, as it stands at files written now.

    Nodes' clocks may be minutes apart. Where this user cannot write there, it is the time of this machine. On NFS this
    also brings the node's view of the names in the folder up to date, since it makes a file there.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\n")
            probe.flush()
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()
