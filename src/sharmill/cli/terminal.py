"""Text from manifests, datasets and file names on its way to a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharmill.executors.logs import printable

if TYPE_CHECKING:
    from rich.text import Text


def plain(text: str, style: str = "") -> Text:
    """The text as rich prints it as it stands: neither its control characters nor its [markup] have a meaning."""
    from rich.text import Text

    return Text(printable(text), style=style)
