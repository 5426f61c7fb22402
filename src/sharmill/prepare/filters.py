"""Numeric filters on manifest keys: ``cer: "<= 0.03"``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sharmill.errors import ConfigError, RejectRecord

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_COMPARISON = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*(\S+)\s*")


@dataclass(frozen=True)
class Filter:
    """A condition that holds where the record's ``key`` compares to ``limit`` as asked."""

    key: str
    symbol: str
    limit: float

    def check(self, record: Mapping[str, Any]) -> None:
        """Raise RejectRecord ``filtered`` where the value is absent, not a number, or on the wrong side."""
        value = record.get(self.key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RejectRecord("filtered", f"{self.key} is {str(value)[:40]!r}, not a number")
        if not _OPERATORS[self.symbol](value, self.limit):
            raise RejectRecord(
                "filtered", f"{self.key} is {str(value)[:40]}, and the filter asks for {self.symbol} {self.limit:g}"
            )


def parse_filters(filters: Mapping[str, str]) -> list[Filter]:
    """Parse the filters of a configuration.

    Raises:
        ConfigError: a filter is not a comparison with a number.
    """
    return [_parse(key, text) for key, text in sorted(filters.items())]


def _parse(key: str, text: str) -> Filter:
    match = _COMPARISON.fullmatch(text)
    try:
        limit = float(match[2]) if match else math.nan
    except ValueError:
        limit = math.nan
    if match is None or math.isnan(limit):
        raise ConfigError(
            f"prepare.filters.{key}: {text!r} is not a comparison with a number; write one such as '<= 0.03'",
            code="bad_config_value",
        )
    return Filter(key, match[1], limit)
