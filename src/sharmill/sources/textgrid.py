"""Parser for Praat's TextGrids: their interval tiers, and the stretches in tiers that a source selects."""

import math
import re
from collections.abc import Iterator
from typing import Any, Final

from sharmill.sources.stretches import Stretch

# Types of the values of an interval or a point, for each type of tier.
_TIERS: Final = {"IntervalTier": (float, float, str), "TextTier": (float, str)}
# Like Praat, read only numbers, texts and flags that stand alone, and skip everything else, such as ``xmin =``.
_TOKEN: Final = re.compile(r'"([^"]*(?:""[^"]*)*)"|([^\s"]+)')
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def parse_tiers(text: str, tier: str | None) -> Iterator[Stretch]:
    """Yield the stretches in the selected tiers of a TextGrid.

    Args:
        text: content of the file.
        tier: value of the source's key ``tier``.

    Raises:
        ValueError: there is no such tier, or the source has to name one of several tiers.
    """
    tiers, pattern = parse_textgrid(text), tier_pattern(tier)
    chosen = [(intervals, match) for name, intervals in tiers if (match := pattern.fullmatch(name))]
    if tier is None and len(tiers) > 1:
        raise ValueError(f"the file {choose_tier([name for name, _ in tiers])}")
    if not chosen:
        names = ", ".join(repr(name) for name, _ in tiers[:20])
        raise ValueError(f"the file has no interval tier {tier!r}; its interval tiers: {names or 'none'}")
    for intervals, match in chosen:
        for start, end, said in intervals:
            if said.strip():
                yield Stretch("", start, end, said.strip(), "".join(match.groups()).strip() or None)


def choose_tier(names: list[str]) -> str:
    """Return the end of a message about a file with several tiers, for a source that selects none of them."""
    shown = ", ".join(repr(name[:40]) for name in names[:20])
    return f"has {len(names)} tiers, {shown}; set tier to one of them, or to '*' for all, one per speaker"


def tier_pattern(tier: str | None) -> re.Pattern[str]:
    """Return a pattern for names of tiers; its group, made from ``*``, matches the speaker's name. None matches any
    name.

    >>> tier_pattern("* - words").fullmatch("Anna - words")[1]
    'Anna'
    """
    return re.compile(".*" if tier is None else re.escape(tier).replace(r"\*", "(.*)"), re.DOTALL)


def parse_textgrid(text: str) -> list[tuple[str, list[tuple[float, float, str]]]]:
    """Return the interval tiers of a TextGrid as (name, [(start, end, text)]); point tiers are left out.

    Raises:
        ValueError: the text is not a TextGrid, or is truncated.

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
        raise ValueError("the file is not a TextGrid in text format")
    take(float, float)
    tiers = []
    for _ in count():
        kind, name = take(str, str)
        if kind not in _TIERS:
            raise ValueError(f"a tier has the unknown type {kind[:40]!r}")
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
    """Return the next token; raise ValueError if its type is not ``kind``."""
    token = next(tokens, None)
    if not isinstance(token, kind):
        other, wanted = ("number", "text") if kind is str else ("text", "number")
        raise ValueError("the file is truncated" if token is None else f"the file has a {other} in place of a {wanted}")
    return token
