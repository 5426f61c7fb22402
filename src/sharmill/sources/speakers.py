"""Speaker tags of records: the tag that a record has, or one made of a plain name or of a template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from sharmill.errors import RejectRecord
from sharmill.sources.templates import Template, name_of
from sharmill.speaker_tag import SpeakerTag, parse_speaker_tag

# The language of ISO 639 for speech of which it is not known, and the speaker of a record that has none.
UNDETERMINED: Final = "und"
NO_SPEAKER: Final = "unknown"
_TAG: Final = re.compile(r"\s*\|(.*)\|\s*", re.DOTALL)
_LANGUAGE_KEYS: Final = ("language", "lang")


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
