"""Logging of ranks: every rank logs to its own file in the run directory."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Sends this process's log records to ``path`` as well, for as long as the context lasts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger()
    sharmill = logging.getLogger("sharmill")
    level = sharmill.level
    sharmill.setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        sharmill.setLevel(level)
        handler.close()


def redirect_output(path: Path) -> None:
    """Sends all that this process prints, and the stack of a crash in native code, to the end of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()
