"""The vocabulary of a manifest: the characters or words of its texts, one a line, as NeMo's recipes write it."""

from __future__ import annotations

from collections import Counter


class Vocabulary:
    """Counts of the characters or words of texts.

    >>> vocabulary = Vocabulary(of_words=False)
    >>> vocabulary.add("abba a")
    >>> vocabulary.to_lines()
    b'a\\nb\\n'
    """

    def __init__(self, *, of_words: bool) -> None:
        self._of_words = of_words
        self._counts: Counter[str] = Counter()

    def add(self, text: str) -> None:
        """Count a text."""
        words = text.split()
        self._counts.update(words if self._of_words else "".join(words))

    def to_lines(self) -> bytes:
        """Return one character or word a line, the commonest first, and those that are as common in their order."""
        ordered = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        return "".join(f"{entry}\n" for entry, _ in ordered).encode()
