"""Speaker tags of records: the tag that a record has, or one made of a plain name or of a template.

A template is a text with fields that stand for keys of a record and for parts of its path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from sharmill.errors import RejectRecord
from sharmill.speaker_tag import SpeakerTag, parse_speaker_tag

# The language of ISO 639 for speech of which it is not known, and the speaker of a record that has none.
UNDETERMINED: Final = "und"
NO_SPEAKER: Final = "unknown"
_TAG: Final = re.compile(r"\s*\|(.*)\|\s*", re.DOTALL)
_LANGUAGE_KEYS: Final = ("language", "lang")
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


@dataclass(frozen=True)
class SpeakerRule:
    """The rule by which the records of a source get their speaker tags.

    Args:
        template: makes the name, or None: the record's own speaker.
        language, dataset: of records that say none themselves.
    """

    template: Template | None
    language: str
    dataset: str

    def make_tag(self, record: Mapping[str, Any], path: str) -> SpeakerTag | None:
        """Return the tag of a record whose audio has ``path`` below its root, or None if it names no speaker.

        Raises:
            RejectRecord: ``bad_speaker``.
        """
        origin, tag = self.origin(record), find_tag(record.get("speaker"))
        if origin == "tag":
            return tag
        if origin == "none":
            return None
        name = self._name({**record, "speaker": tag.speaker} if tag else record, path)
        languages = (record.get(key) for key in _LANGUAGE_KEYS)
        language = next((text for text in languages if isinstance(text, str) and text.strip()), self.language)
        return SpeakerTag(
            tag.language if tag else canonical_name(language),
            tag.dataset if tag else self.dataset,
            canonical_name(name),
            tag.further if tag else (),
        )

    def _name(self, record: Mapping[str, Any], path: str) -> str:
        if self.template:
            try:
                return self.template.fill(record, path)
            except ValueError as error:
                raise RejectRecord("bad_speaker", str(error)) from error
        if not (name := name_of(record["speaker"])):
            raise RejectRecord("bad_speaker", f"speaker is {type(record['speaker']).__name__}, not a name")
        return name

    def without_speaker(self, record: Mapping[str, Any]) -> SpeakerTag:
        """Return the tag of a record that names no speaker, where none is needed."""
        named = SpeakerRule(Template((NO_SPEAKER,)), self.language, self.dataset).make_tag(record, "")
        assert named is not None
        return named

    def origin(self, record: Mapping[str, Any]) -> str:
        """Return what makes the tag of a record: ``template``, ``tag``, ``name`` (a plain one), or ``none``."""
        speaker = record.get("speaker")
        if self.template:
            return "template"
        if speaker is None or (isinstance(speaker, str) and not speaker.strip()):
            return "none"
        return "tag" if isinstance(speaker, str) and _TAG.fullmatch(speaker) else "name"


def find_tag(speaker: Any) -> SpeakerTag | None:
    """Return the tag that a value is, with names that have blanks made canonical, or None for any other value.

    Raises:
        RejectRecord: ``bad_speaker`` where it begins and ends as a tag and is none.
    """
    match = _TAG.fullmatch(speaker) if isinstance(speaker, str) else None
    if match is None:
        return None
    try:
        return parse_speaker_tag(speaker)
    except RejectRecord:
        # A name with a blank: each part goes on up to the next word with a colon.
        pairs = [part.partition(":") for part in re.split(r"\s+(?=[^\s:]+:)", match[1].strip())]
        words = [f"{name}:{canonical_name(value)}" for name, colon, value in pairs if colon and value.strip()]
        if len(words) < len(pairs):
            raise
        return parse_speaker_tag(f"| {' '.join(words)} |")


def canonical_name(name: str) -> str:
    """Return a name as a tag can have it, without merging two: blanks become ``_`` with a hash of the name behind.

    >>> canonical_name("anna"), canonical_name("Anna Lee")
    ('anna', 'Anna_Lee-f033b8597f4510de')
    """
    words = name.split()
    if len(words) < 2:
        return name.strip()
    return f"{'_'.join(words)}-{xxhash.xxh3_64_hexdigest(name.strip().encode())}"
