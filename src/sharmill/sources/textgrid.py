"""TextGrid files of Praat, in their long and their short form: the tiers of intervals in them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# Praat itself takes numbers, texts and flags that stand alone, and skips all else, such as ``xmin =``.
_TOKEN: Final = re.compile(r'"([^"]*(?:""[^"]*)*)"|([^\s"]+)')
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Tier:
    """A tier of intervals: (begin, end, text), times in seconds."""

    name: str
    intervals: list[tuple[float, float, str]]


def parse_textgrid(text: str) -> list[Tier]:
    """Return the tiers of intervals of a TextGrid; tiers of points are left out.

    Raises:
        ValueError: the text is no TextGrid, or it is cut off.

    Example:
        >>> parse_textgrid('"ooTextFile" "TextGrid" 0 1 <exists> 1 "IntervalTier" "words" 0 1 1 0 1 "yes"')
        [Tier(name='words', intervals=[(0.0, 1.0, 'yes')])]
    """
    tokens = _Tokens(text)
    if [tokens.text(), tokens.text()] != ["ooTextFile", "TextGrid"]:
        raise ValueError("the file is no TextGrid in text form")
    tokens.number()
    tokens.number()
    tiers = []
    for _ in range(tokens.count()):
        kind, name = tokens.text(), tokens.text()
        if kind not in ("IntervalTier", "TextTier"):
            raise ValueError(f"a tier is a {kind[:40]!r}, not one of intervals or points")
        tokens.number()
        tokens.number()
        if kind == "TextTier":
            for _ in range(tokens.count()):
                tokens.number()
                tokens.text()
            continue
        found = ((tokens.number(), tokens.number(), tokens.text()) for _ in range(tokens.count()))
        tiers.append(Tier(name, list(found)))
    return tiers


class _Tokens:
    """The numbers and texts of a file, one after the other."""

    def __init__(self, text: str) -> None:
        self._tokens = self._iterate(text)

    @staticmethod
    def _iterate(text: str) -> Iterator[str | float]:
        for match in _TOKEN.finditer(text):
            if match[1] is not None:
                yield match[1].replace('""', '"')
            elif _NUMBER.fullmatch(match[2]) and math.isfinite(number := float(match[2])):
                yield number

    def text(self) -> str:
        """Return the next token, a text."""
        token = next(self._tokens, None)
        if not isinstance(token, str):
            raise ValueError("the file is cut off" if token is None else "the file has a number in the place of a text")
        return token

    def number(self) -> float:
        """Return the next token, a number."""
        token = next(self._tokens, None)
        if not isinstance(token, float):
            raise ValueError("the file is cut off" if token is None else "the file has a text in the place of a number")
        return token

    def count(self) -> int:
        """Return the next token, a number of things."""
        return int(min(self.number(), 1e9))
