"""Praat's TextGrids: their tiers of intervals, and the stretches in those that a source names."""

import math
import re
from collections.abc import Iterator
from typing import Any, Final

from sharmill.sources.stretches import Stretch

# The values of each item, by the kind of the tier.
_TIERS: Final = {"IntervalTier": (float, float, str), "TextTier": (float, str)}
# Praat itself takes numbers, texts and flags that stand alone in a TextGrid, and skips all else, such as ``xmin =``.
_TOKEN: Final = re.compile(r'"([^"]*(?:""[^"]*)*)"|([^\s"]+)')
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def parse_tiers(text: str, tier: str | None) -> Iterator[Stretch]:
    """Yield the stretches in tiers of a TextGrid; raise ValueError if it has no such tier, or ``tier`` has to be named.

    Args:
        text: of the file.
        tier: the key of the source.
    """
    tiers, pattern = parse_textgrid(text), tier_pattern(tier)
    chosen = [(intervals, match) for name, intervals in tiers if (match := pattern.fullmatch(name))]
    if tier is None and len(tiers) > 1:
        raise ValueError(f"the file {choose_tier([name for name, _ in tiers])}")
    if not chosen:
        names = ", ".join(repr(name) for name, _ in tiers[:20])
        raise ValueError(f"the file has no tier of intervals that is {tier!r}; it has {names or 'none'}")
    for intervals, match in chosen:
        for start, end, said in intervals:
            if said.strip():
                yield Stretch("", start, end, said.strip(), "".join(match.groups()).strip() or None)


def choose_tier(names: list[str]) -> str:
    """Return the end of a sentence about a file of several tiers, of which none is named."""
    shown = ", ".join(repr(name[:40]) for name in names[:20])
    return (
        f"has {len(names)} tiers, {shown}; name one as tier of the source, or set tier to '*' for all, each a speaker"
    )


def tier_pattern(tier: str | None) -> re.Pattern[str]:
    """Return a pattern of the names of tiers, whose group is what ``*`` stands for, the speaker; None is any name.

    >>> tier_pattern("* - words").fullmatch("Anna - words")[1]
    'Anna'
    """
    return re.compile(".*" if tier is None else re.escape(tier).replace(r"\*", "(.*)"), re.DOTALL)


def parse_textgrid(text: str) -> list[tuple[str, list[tuple[float, float, str]]]]:
    """Return the tiers of intervals of a TextGrid, (name, [(begin, end, text)]); tiers of points are left out.

    Raises:
        ValueError: the text is no TextGrid, or it is cut off.

    Example:
        >>> parse_textgrid('"ooTextFile" "TextGrid" 0 1 <exists> 1 "IntervalTier" "words" 0 1 1 0 1 "yes"')
        [('words', [(0.0, 1.0, 'yes')])]
    """
    tokens = _iterate_tokens(text)

    def take(*kinds: type) -> list[Any]:
        return [_take(tokens, kind) for kind in kinds]

    def count() -> range:
        return range(int(min(*take(float), 1e9)))

    if take(str, str) != ["ooTextFile", "TextGrid"]:
        raise ValueError("the file is no TextGrid in text form")
    take(float, float)
    tiers = []
    for _ in count():
        kind, name = take(str, str)
        if kind not in _TIERS:
            raise ValueError(f"a tier is a {kind[:40]!r}, not one of intervals or points")
        take(float, float)
        items = [tuple(take(*_TIERS[kind])) for _ in count()]
        if kind == "IntervalTier":
            tiers.append((name, items))
    return tiers


def _iterate_tokens(text: str) -> Iterator[str | float]:
    for match in _TOKEN.finditer(text):
        if match[1] is not None:
            yield match[1].replace('""', '"')
        elif _NUMBER.fullmatch(match[2]) and math.isfinite(number := float(match[2])):
            yield number


def _take(tokens: Iterator[str | float], kind: type) -> Any:
    """Return the next token, a text or a number."""
    token = next(tokens, None)
    if not isinstance(token, kind):
        other, wanted = ("number", "text") if kind is str else ("text", "number")
        raise ValueError(
            "the file is cut off" if token is None else f"the file has a {other} in the place of a {wanted}"
        )
    return token
