"""Shared disks (NFS), on which files of other nodes become visible with a delay, and the nodes' clocks differ.

An NFS client caches names, listings and attributes for up to a minute (acregmin, acdirmin). During this time, new files
seem to be missing. If another process is known to have created a file, a missing name therefore does not mean that the
file is missing: ``VisibilityTimeout`` waits for it, for at most ``executor.seconds_until_seen``. Everything that a
process has seen or created stays visible to it. The server decides immediately whether a name can be created,
regardless of what this node sees.
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

# Errors for files that another node has created or replaced and that this node does not see yet.
_NOT_YET_VISIBLE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


class VisibilityTimeout:
    """Waits until this node sees files written before this object was created; all waits share ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def retry_until_visible(self, work: Callable[[], Result]) -> Result:
        """Call a function and return its result, retrying while it fails on files that may not be visible yet."""
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
            log.warning("%s is still not visible here after waiting %g s for a shared disk", what, self._seconds)
            return False
        return True


def time_of_folder(folder: Path) -> float:
    """Return the time of a folder's file system in Unix seconds, as recorded for files that are written now.

    The clocks of nodes may be minutes apart. If this user cannot write to the folder, this is the time of this machine.
    On NFS, creating a file also updates this node's view of the names in the folder.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\n")
            probe.flush()
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()
