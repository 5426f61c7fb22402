"""Comparisons of named values with constants, such as ``dnsmos_ovrl > 3``, which filter records and cuts."""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sharmill.errors import ConfigError

_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_NUMBER: Final = r"[+-]?(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|(?i:inf))"
# The longer symbols come first in the table, so that "<=" is not taken for "<".
_SYMBOL: Final = "|".join(_OPERATORS)
_RIGHT_SIDE: Final = re.compile(rf"\s*({_SYMBOL})\s*({_NUMBER})\s*")
_CONDITION: Final = re.compile(rf"\s*([^\W\d]\w*)\s*({_SYMBOL})\s*(?:({_NUMBER})|'([^']*)'|\"([^\"]*)\")\s*(and\b|$)")


@dataclass(frozen=True)
class Comparison:
    """Condition on the value of ``key``, which must be a string if ``limit`` is a string, and a number otherwise."""

    key: str
    symbol: str
    limit: float | str

    def __str__(self) -> str:
        return f"{self.key} {self.symbol} {self.limit!r}" if isinstance(self.limit, str) else (
            f"{self.key} {self.symbol} {self.limit:g}"
        )  # fmt: skip

    def fault(self, value: Any) -> str:
        """Return the reason why a value does not satisfy the condition; an empty string if it does.

        A value that is missing, not finite, or of a different type than ``limit`` never satisfies the condition.
        """
        kind, types = ("a text", str) if isinstance(self.limit, str) else ("a number", (int, float))
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if isinstance(value, bool) or not isinstance(value, types) or not is_finite:
            return f"{self.key} is {str(value)[:40]!r}, not {kind}"
        if not _OPERATORS[self.symbol](value, self.limit):
            return f"{self.key} is {str(value)[:40]}, but the filter requires {self}"
        return ""


def parse_comparison(key: str, text: str) -> Comparison | None:
    """Return the comparison of ``key`` in a text such as ``<= 0.03``; None if the text is not a comparison."""
    match = _RIGHT_SIDE.fullmatch(text)
    return Comparison(key, match[1], float(match[2])) if match else None


def parse_where(text: str) -> list[Comparison]:
    """Parse conditions joined by ``and``; nothing in the text is evaluated as code.

    Raises:
        ConfigError: the text does not have this form.

    >>> [str(one) for one in parse_where("dnsmos_ovrl > 3 and bandwidth >= 7.5 and kind == 'read'")]
    ['dnsmos_ovrl > 3', 'bandwidth >= 7.5', "kind == 'read'"]
    """
    found: list[Comparison] = []
    position = 0
    while match := _CONDITION.match(text, position):
        key, symbol, number, single, double, joint = match.groups()
        limit = float(number) if number is not None else single if single is not None else double
        found.append(Comparison(key, symbol, limit))
        position = match.end()
        if not joint:
            return found
    raise ConfigError(
        f"where: {text!r} cannot be parsed from {text[position:][:40]!r} on: compare columns with numbers or quoted "
        "texts, and join comparisons with 'and', as in \"dnsmos_ovrl > 3 and bandwidth >= 7.5\"",
        code="bad_config_value",
    )
