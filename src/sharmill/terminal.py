"""Text from manifests, datasets and file names on its way to a terminal, or to a log that is read in one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def printable(text: str) -> str:
    """The text without control characters, which could move the cursor, rename the window or hide what follows."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def plain(text: str, style: str = "") -> Text:
    """The text as rich prints it as it stands: neither its control characters nor its [markup] have a meaning."""
    from rich.text import Text

    return Text(printable(text), style=style)


class PrintableFormatter(logging.Formatter):
    """Log records without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
