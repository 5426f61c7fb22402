"""References of a configuration to the environment: what is stored of a run has them as they were written.

The values may be secrets. They are used, and handed to ranks, but the stored configuration, the identities of plans and
the index of a dataset name the variable instead.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_VARIABLE: Final = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,:{}]+)")
_WITHOUT_DEFAULT: Final = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,:{}]+)\s*\}")
# Keys of texts that have no default.
_REQUIRED: Final = ("name", "run_dir", "dataset_dir", "model")
# Shorter values are no secrets, and stand for themselves in too many places.
_MIN_CHARACTERS: Final = 4
_DIGEST_CHARACTERS: Final = 12


@dataclass(frozen=True)
class References:
    """The references of one configuration.

    Args:
        written: values by their place in the configuration, ``("encode", "codecs", 0, "model")``, as they were written.
        variables: for each value that the environment gave, the name of its variable.
    """

    written: Mapping[tuple[str | int, ...], str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Any) -> References:
        """Return the references in the values of a YAML file that are not resolved yet."""
        written = {place: text for place, text in _texts(values, ()) if "${" in text}
        names = {name for text in written.values() for name in _VARIABLE.findall(text)}
        found = {os.environ[name]: name for name in sorted(names, reverse=True) if name in os.environ}
        return cls(
            written=written if names else {},
            variables={value: name for value, name in found.items() if len(value) >= _MIN_CHARACTERS},
        )

    def without_unset(self, values: Any) -> Any:
        """Return values that are not resolved yet, fit to be shown where variables are not set: without references.

        Names and paths become the texts of their references, other keys get their defaults.
        """
        texts = " ".join(self.written.values())
        if all(name in os.environ for name in _WITHOUT_DEFAULT.findall(texts)):
            return values
        return self._without(values, ())

    def _without(self, value: Any, place: tuple[str | int, ...]) -> Any:
        if place in self.written:
            return "_".join(re.findall(r"[\w.-]+", self.written[place].replace("oc.env:", "")))
        if isinstance(value, dict):
            kept = {key: child for key, child in value.items() if (*place, key) not in self.written or key in _REQUIRED}
            return {key: self._without(child, (*place, key)) for key, child in kept.items()}
        if isinstance(value, list):
            return [self._without(child, (*place, number)) for number, child in enumerate(value)]
        return value

    def put_back(self, values: Any) -> Any:
        """Return the resolved values of a configuration with the references in their places again."""
        return self._put_back(values, ())

    def _put_back(self, value: Any, place: tuple[str | int, ...]) -> Any:
        if place in self.written:
            return self.written[place]
        if isinstance(value, dict):
            return {key: self._put_back(child, (*place, key)) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self._put_back(child, (*place, number)) for number, child in enumerate(value)]
        return value


def hide(value: Any, variables: Mapping[str, str], *, digests: bool = False) -> Any:
    """Return JSON values in which variables of the environment stand for what they are set to, keys included.

    Args:
        variables: the names of variables, by their values.
        digests: add a part of a value's SHA-256, by which a change of it is noticed.

    >>> hide({"model": "/secret/mimi"}, {"/secret": "MODELS"})
    {'model': '${oc.env:MODELS}/mimi'}
    """
    if not variables:
        return value
    if isinstance(value, dict):
        return {hide(k, variables, digests=digests): hide(v, variables, digests=digests) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [hide(child, variables, digests=digests) for child in value]
    if not isinstance(value, str):
        return value

    def name(match: re.Match[str]) -> str:
        digest = hashlib.sha256(match[0].encode(errors="surrogateescape")).hexdigest()[:_DIGEST_CHARACTERS]
        return f"${{oc.env:{variables[match[0]]}}}" + (f"#{digest}" if digests else "")

    longest_first = sorted(variables, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), name, value)


def _texts(value: Any, place: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _texts(child, (*place, key))
    elif isinstance(value, list):
        for number, child in enumerate(value):
            yield from _texts(child, (*place, number))
