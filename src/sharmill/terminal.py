"""Text from manifests and file names on its way to a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text without control characters, which could move the cursor, rename the window or hide what follows."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
