"""The log of a process, and the redirection of its output to it."""

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
    """Append all output of this process to ``path``, including its stacks if it crashes or receives SIGUSR1."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = open_log(path)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    # Flush after every line: a killed process cannot flush, and its last output is the most important.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Pass the log itself, since a C library may redirect standard error temporarily.
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending, creating its folder if needed.

    Raises:
        FatalError: the log cannot be opened, because of the disk or an obstacle at the path.
    """
    with stopping_errors(path):
        with suppress(FileNotFoundError):
            return open_stored(path, append=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_stored(path, append=True)
