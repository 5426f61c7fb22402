"""References of a configuration to the environment: what is stored of a run has them as they were written.

The values may be secrets. They are used, and handed to ranks, but the stored configuration, the identities of plans and
the index of a dataset name the variable instead.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

_VARIABLE: Final = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,:{}]+)")
_WITHOUT_DEFAULT: Final = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,:{}]+)\s*\}")
# Keys of texts that have no default.
_REQUIRED: Final = ("name", "run_dir", "dataset_dir", "model")
# Shorter values are not looked for in texts that were made of the configuration, which have the same letters by chance.
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
        return (
            cls(written=written, variables=_named(written.values())) if _named(written.values(), unset=True) else cls()
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
        return self._put_back(values, (), lambda written, value: written)

    def identify(self, identity: dict[str, Any], section: str) -> dict[str, Any]:
        """Return the identity of a stage's plan without values of the environment.

        Its keys are those of the whole configuration, or of the section. Values at the place of a reference are as they
        were written, of whatever length and type they are; in others, which may be made of several keys, the values of
        variables are looked for. A part of the SHA-256 of each stands behind it, by which a change is noticed.
        """
        if not self.written:
            return identity
        variables = _searchable(self.variables)
        for place in ((), (section,)):
            identity = self._put_back(identity, place, _with_digests)
        return cast("dict[str, Any]", _hide(identity, variables, digests=True))

    def hide(self, value: Any) -> Any:
        """Return JSON values in which variables stand for what they are set to, where that has four characters or more.

        >>> References(variables={"/secret": "MODELS"}).hide({"model": "/secret/mimi"})
        {'model': '${oc.env:MODELS}/mimi'}
        """
        return _hide(value, _searchable(self.variables), digests=False)

    def hide_at(self, place: tuple[str | int, ...], text: str) -> str:
        """Return a text that was made of the value at a place with its variables in it, however short their values."""
        written = self.written.get(place)
        return text if written is None else _hide(text, _named([written]), digests=False)

    def _put_back(self, value: Any, place: tuple[str | int, ...], put: Callable[[str, Any], Any]) -> Any:
        if place in self.written:
            return put(self.written[place], value)
        if isinstance(value, dict):
            return {key: self._put_back(child, (*place, key), put) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self._put_back(child, (*place, number), put) for number, child in enumerate(value)]
        return value


def _named(texts: Iterable[str], *, unset: bool = False) -> dict[str, str]:
    """Return the names of the variables in texts by their values; ``unset`` adds those that have none."""
    names = sorted({name for text in texts for name in _VARIABLE.findall(text)}, reverse=True)
    return {os.environ.get(name, ""): name for name in names if os.environ.get(name) or unset}


def _searchable(variables: Mapping[str, str]) -> dict[str, str]:
    return {value: name for value, name in variables.items() if len(value) >= _MIN_CHARACTERS}


def _with_digests(written: str, value: Any) -> Any:
    """Return what is stored of a value at the place of a reference; an identity has several texts for a folder."""
    if isinstance(value, dict):
        return {key: _with_digests(written, child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_with_digests(written, child) for child in value]
    return None if value is None else f"{written}#{_digest(str(value))}"


def _hide(value: Any, variables: Mapping[str, str], *, digests: bool) -> Any:
    if not variables:
        return value
    if isinstance(value, dict):
        return {_hide(k, variables, digests=digests): _hide(v, variables, digests=digests) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(child, variables, digests=digests) for child in value]
    if not isinstance(value, str):
        return value

    def name(match: re.Match[str]) -> str:
        return f"${{oc.env:{variables[match[0]]}}}" + (f"#{_digest(match[0])}" if digests else "")

    longest_first = sorted(variables, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), name, value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGEST_CHARACTERS]


def _texts(value: Any, place: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _texts(child, (*place, key))
    elif isinstance(value, list):
        for number, child in enumerate(value):
            yield from _texts(child, (*place, number))
