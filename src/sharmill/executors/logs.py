"""Logging of ranks: every rank logs to its own file in the run directory."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO

from sharmill.errors import SharmillError
from sharmill.files.storage import open_stored, stopping_errors

_FURTHER_LINE = re.compile(r"\n(?!  |\n|$)")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def printable(text: str) -> str:
    """Return text as it may be shown or logged: names in it come from manifests, datasets and folders of others.

    It has no control characters, which could move the cursor, rename the window or hide text. Its further lines are
    indented, so that no name with a line break in it makes up a line of its own.
    """
    shown = "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
    return _FURTHER_LINE.sub("\n  ", shown)


def one_line(text: str) -> str:
    """Return text as ``printable`` does, line breaks replaced."""
    return printable(text.replace("\n", "\N{REPLACEMENT CHARACTER}"))


def describe_error(error: SharmillError) -> str:
    """Return an error as it is shown: its line, and the further ones that it was made with."""
    return "\n  ".join(map(one_line, error.lines))


class PrintableFormatter(logging.Formatter):
    """Log records without control characters, each message on one line; a traceback follows on its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send this process's log records to ``path`` as well, for as long as the context lasts."""
    stream = TextIOWrapper(_open_log(path), encoding="utf-8")
    handler = _LogFile(stream)
    handler.setFormatter(PrintableFormatter(_FORMAT))
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
        # What could not be written is still in the buffer, and closing tries once more.
        with suppress(OSError):
            stream.close()


def redirect_output(path: Path) -> None:
    """Send all that this process prints to the end of ``path``, and its stacks if it crashes or gets SIGUSR1."""
    sys.stdout.flush()
    sys.stderr.flush()
    with _open_log(path) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # A process that is killed does not flush: what it printed last is what one looks for.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def _open_log(path: Path) -> BinaryIO:
    with stopping_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_stored(path, append=True)


class _LogFile(logging.StreamHandler[TextIO]):
    """A log that a full disk ends quietly: the unit that meets it says so in one line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
