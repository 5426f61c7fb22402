"""Differences between two JSON values: the identities of two plans, or a record and what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

_SHOWN_CHARACTERS: Final = 60


class _Absent:
    """The value of a key that is not there."""


ABSENT: Final = _Absent()


class Difference(NamedTuple):
    """A place at which two values differ, such as ``match.min_similarity``; ``ABSENT`` where only one has the key."""

    path: str
    old: Any
    new: Any


def find_differences(old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    """Yield the innermost places at which two values differ, keys in their alphabetical order.

    >>> [tuple(found) for found in find_differences({"a": [1, 2], "b": 3}, {"a": [1, 5], "b": 3})]
    [('a[1]', 2, 5)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{path}.{key}" if path else key
            yield from find_differences(old.get(key, ABSENT), new.get(key, ABSENT), inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from find_differences(left, right, f"{path}[{number}]")
    elif old is ABSENT or new is ABSENT or _encode(old) != _encode(new):
        yield Difference(path, old, new)


def describe_differences(old: Any, new: Any) -> list[str]:
    """Return a phrase for each difference: ``match.min_similarity (0.6, now 0.7)``."""
    return [f"{path} ({show(was)}, now {show(now)})" for path, was, now in find_differences(old, new)]


def show(value: Any) -> str:
    """Return a value as JSON of at most 60 characters; ``null`` for one that is absent."""
    text = "null" if value is ABSENT else msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
