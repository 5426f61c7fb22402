"""Formatting of numbers and text for the report."""

import re
from typing import Final

_MAX_TEXT: Final = 400
# Control characters, characters that change the text direction, and surrogates.
_NOT_SHOWN: Final = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def show_number(value: float) -> str:
    """Return a number in a short readable form.

    >>> [show_number(value) for value in (0.0, 0.25, 12.5, 1234.0, 2_500_000.0)]
    ['0', '0.25', '12.5', '1,234', '2.5M']
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]:.3g}{unit}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def shorten(value: object, longest: int = _MAX_TEXT) -> str:
    """Return a value as text of limited length, since values in a dataset may have any length.

    >>> len(shorten("a" * 100_000))
    400
    """
    text = str(value)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def plain_text(text: str) -> str:
    """Return text in which control characters and other invisible characters are replaced.

    >>> plain_text("a\\x1b[31m")
    'a\N{REPLACEMENT CHARACTER}[31m'
    """
    return _NOT_SHOWN.sub("\N{REPLACEMENT CHARACTER}", text)
