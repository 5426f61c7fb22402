"""Templates: texts with fields that stand for keys of a record and for parts of its path."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_FIELD: Final = re.compile(r"\{([^{}\[\]:]+)(?:\[(-?\d+)\])?(:prefix)?\}")


@dataclass(frozen=True)
class TemplateField:
    """One ``{...}`` of a template: a key, or a part of the path; ``prefix`` takes what is before the first - or _."""

    key: str
    index: int | None
    prefix: bool

    def value(self, record: Mapping[str, Any], path: str) -> str:
        """Return the text for a record whose audio has ``path``; raise ValueError where there is none."""
        text = self._of_path(path) if self.index is not None else name_of(record.get(self.key))
        if self.prefix and text is not None:
            text = re.split("[-_]", text, maxsplit=1)[0]
        if not text:
            place = f"in the path {path!r}" if self.index is not None else "in the record, or no text or whole number"
            raise ValueError(f"the template takes {self}, which is not {place}")
        return text

    def _of_path(self, path: str) -> str | None:
        assert self.index is not None
        parts = path.split("/")
        stem, dot, _ = parts[-1].rpartition(".")
        parts[-1] = stem if stem and dot else parts[-1]
        return parts[self.index] if -len(parts) <= self.index < len(parts) else None

    def __str__(self) -> str:
        index = "" if self.index is None else f"[{self.index}]"
        return f"{{{self.key}{index}{':prefix' * self.prefix}}}"


@dataclass(frozen=True)
class Template:
    """A text made of keys of a record and parts of its path.

    >>> Template.parse("{path[0]}_{session}").fill({"session": 3}, "anna/one.wav")
    'anna_3'
    >>> Template.parse("{path[-1]:prefix}").fill({}, "test/1688-142285-0000.flac")
    '1688'
    """

    parts: tuple[str | TemplateField, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse a template; raise ValueError where it is none."""
        parts: list[str | TemplateField] = []
        position = 0
        for match in _FIELD.finditer(text):
            key, index, prefix = match.groups()
            if (key == "path") != (index is not None):
                raise ValueError(f"{match[0]} of the template {text!r} is no field: write {{key}}, or {{path[0]}}")
            parts += [text[position : match.start()], TemplateField(key, int(index) if index else None, bool(prefix))]
            position = match.end()
        parts.append(text[position:])
        if any("{" in part or "}" in part for part in parts if isinstance(part, str)):
            raise ValueError(
                f"the template {text!r} cannot be read: its fields are {{key}}, {{path[0]}}, {{key:prefix}}"
            )
        if not text.strip():
            raise ValueError("the template is empty; leave the key out")
        return cls(tuple(part for part in parts if part))

    @property
    def keys(self) -> list[str]:
        """The keys of records that it takes."""
        return [part.key for part in self.parts if isinstance(part, TemplateField) and part.index is None]

    def fill(self, record: Mapping[str, Any], path: str) -> str:
        """Return the text for a record; raise ValueError where a field has no value."""
        return "".join(part if isinstance(part, str) else part.value(record, path) for part in self.parts)

    def find_unknown(self, records: Iterable[Mapping[str, Any]]) -> tuple[str, list[str]] | None:
        """Return the first key that none of ``records`` has, and the keys that they have; None if all keys are there.

        Without records there is nothing to compare with.
        """
        known = list(dict.fromkeys(key for record in records for key in record))
        missing = [key for key in self.keys if known and key not in known]
        return (missing[0], known) if missing else None


def name_of(value: Any) -> str | None:
    """Return a text or whole number as a name without blanks around it; None for anything else."""
    # Numbers of more than 64 bits are none that anybody gave a name, and Python limits their digits.
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63):
        return str(value).strip()
    return None
