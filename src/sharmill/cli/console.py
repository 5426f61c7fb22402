"""The console that commands print to, and text from manifests, datasets and file names on its way there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sharmill.executors.logs import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def make_console() -> Console:
    """Return the console of a command."""
    from rich.console import Console

    # A log file has no width of its own, and rich would assume 80 columns.
    return Console(highlight=False, width=None if sys.stdout is not None and sys.stdout.isatty() else 120)


def plain(text: str, style: str = "") -> Text:
    """Return text that rich prints as it stands: neither its control characters nor its [markup] have a meaning."""
    from rich.text import Text

    return Text(printable(text), style=style)


def make_table(title: str) -> Table:
    """Return an empty table as all commands print them."""
    from rich.table import Table

    return Table(title=plain(title), title_justify="left")
