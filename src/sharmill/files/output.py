"""Logs of a process, and what it prints."""

import faulthandler
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from sharmill.files.disk import stopping_errors
from sharmill.files.stored import open_stored


def redirect_output(path: Path) -> None:
    """Send all that this process prints to the end of ``path``, and its stacks if it crashes or gets SIGUSR1."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = open_log(path)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    # A process that is killed does not flush: what it printed last is what one looks for.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # It keeps the log open, for the standard error may go elsewhere while a C library is at work.
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending; its folder is made if need be.

    Raises:
        FatalError: the disk or what is in the way there does not allow it.
    """
    with stopping_errors(path):
        with suppress(FileNotFoundError):
            return open_stored(path, append=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_stored(path, append=True)
