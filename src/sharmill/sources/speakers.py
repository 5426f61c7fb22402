"""Speaker tags of records: the tag that a record has, or one made of a plain name or of a template.

A template is a text with fields that stand for keys of a record and for parts of its path. Placeholders, such as
``N/A``, are no values, whatever the source.
"""

import math
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import xxhash

from sharmill.config import require
from sharmill.errors import RejectRecord, refuse_record
from sharmill.manifest import SpeakerTag, parse_speaker_tag

# The language of ISO 639 for speech of which it is not known, and the speaker of a record that has none.
UNDETERMINED: Final = "und"
NO_SPEAKER: Final = "unknown"
# Words for a value that is not known, as pandas, R, SQL, Python and corpora write it, in any case and among any marks;
# and, of words with a blank between them, their form as a canonical name.
_PLACEHOLDER: Final = re.compile(
    r"n[/.]?a|nan|nil|null|(?:(?:speaker|spkr?)[\W_]*)?"
    r"(?:none|unk|unknown|undefined|unspecified|unidentified|anonymous)(?:[\W_]*(?:speaker|spkr?))?(?:-[0-9a-f]{16})?|",
    re.IGNORECASE,
)
_MARKS: Final = string.punctuation + string.whitespace + "\u2013\u2014\u2026"
# The shortest placeholders are such codes, too: of Nauruan and Min Nan.
_LANGUAGE_CODE: Final = re.compile(r"\s*[a-z]{2,3}\s*")
_TAG: Final = re.compile(r"\s*\|(.*)\|\s*", re.DOTALL)
_FIELD: Final = re.compile(r"\{(?P<key>[^{}\[\]:]+)(?:\[(?P<index>-?\d+)\])?(?P<prefix>:prefix)?\}")


def is_missing(value: Any) -> bool:
    """Return True if a value is none, or a placeholder that stands for none.

    >>> [is_missing(value) for value in ("N/A", "<unk>", "-", "", -1, math.nan, None)]
    [True, True, True, True, True, True, True]
    >>> [is_missing(value) for value in ("84", "Nan", "nana", 0)]
    [False, False, False, False]
    """
    if isinstance(value, str):
        text = value.strip()
        # With these letters the words are names of people.
        is_name = text in ("Na", "Nan", "Nil", "Null")
        # Hugging Face's number for no label, and NULL in dumps of SQL.
        is_mark = text in ("-1", "-1.0", r"\N")
        return is_mark or (not is_name and _PLACEHOLDER.fullmatch(text.strip(_MARKS)) is not None)
    return value is None or value == -1 or (isinstance(value, float) and math.isnan(value))


def names_no_language(value: Any) -> bool:
    """Return True if a value is missing, and no code of ISO 639 such as ``nan`` either."""
    return is_missing(value) and not (isinstance(value, str) and _LANGUAGE_CODE.fullmatch(value))


@dataclass(frozen=True)
class Template:
    """A text made of keys of a record, parts of them between - and _, and parts of its path.

    ``:prefix`` takes what is before the first - or _.

    >>> Template("{path[0]}_{session}").fill({"session": 3}, "anna/one.wav")
    'anna_3'
    >>> Template("{id[0]}-{id[1]}").fill({"id": "10148_10119_000000"}, "one.wav")
    '10148-10119'
    >>> Template("{path[-1]:prefix}").fill({}, "test/1688-142285-0000.flac")
    '1688'

    Raises:
        ValueError: the text is no template.
    """

    text: str

    def __post_init__(self) -> None:
        for field in _FIELD.finditer(self.text):
            is_field = field["key"] != "path" or field["index"] is not None
            require(is_field, f"{field[0]} of the template {self.text!r} is no field: write {{key}}, or {{path[0]}}")
        is_whole = not set("{}") & set(_FIELD.sub("", self.text))
        fields = "its fields are {key}, {key[0]}, {key:prefix}, {path[0]}"
        require(is_whole, f"the template {self.text!r} cannot be read: {fields}")
        require(self.text.strip() != "", "the template is empty; leave the key out")

    @cached_property
    def keys(self) -> list[str]:
        """The keys of records that it takes."""
        return [field["key"] for field in _FIELD.finditer(self.text) if field["key"] != "path"]

    def fill(self, record: Mapping[str, Any], path: str) -> str:
        """Return the text for a record whose audio has ``path``; raise ValueError where a field has no value."""

        def value(field: re.Match[str]) -> str:
            is_path = field["key"] == "path"
            text = _part_of(path, int(field["index"])) if is_path else name_of(record.get(field["key"]))
            index = 0 if field["prefix"] else None if is_path or field["index"] is None else int(field["index"])
            if index is not None and text is not None:
                text = _pick(re.split("[-_]", text), index)
            if not text:
                place = f"in the path {path!r}" if is_path else "in the record, or names nobody"
                raise ValueError(f"the template takes {field[0]}, which is not {place}")
            return text

        return _FIELD.sub(value, self.text)


def _part_of(path: str, index: int) -> str | None:
    """Return a part of a path, the last one without its suffix; None where there are not so many."""
    parts = path.split("/")
    stem, dot, _ = parts[-1].rpartition(".")
    parts[-1] = stem if stem and dot else parts[-1]
    return _pick(parts, index)


def _pick(parts: list[str], index: int) -> str | None:
    return parts[index] if -len(parts) <= index < len(parts) else None


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

    def make_tag(self, record: Mapping[str, Any], path: str, nameless: str | None = None) -> SpeakerTag | None:
        """Return the tag of a record whose audio has ``path`` below its root.

        If it names no speaker, that has the name ``nameless``; without such a name None is returned.

        Raises:
            RejectRecord: ``bad_speaker``.
        """
        tag = find_tag(record.get("speaker"))
        if tag and tag.language and tag.dataset and tag.speaker and not self.template:
            return tag
        origin = self.origin(record)
        if origin == "none" and nameless is None:
            return None
        name = nameless if origin == "none" else tag.speaker if tag else name_of(record.get("speaker"))
        if self.template:
            values = {**record, "speaker": tag.speaker} if tag else record
            known = {key: values[key] for key in self.template.keys if not is_missing(values.get(key))}
            try:
                name = self.template.fill(known, path)
            except ValueError as error:
                raise RejectRecord("bad_speaker", str(error)) from error
        if name is None or (is_missing(name) and origin != "none"):
            shown = repr(name) if name else type(record.get("speaker")).__name__
            raise RejectRecord("bad_speaker", f"speaker is {shown}, which is no name")
        return SpeakerTag(
            self._find_language(record, tag),
            (tag and tag.dataset) or self.dataset,
            canonical_name(name),
            tag.further if tag else (),
        )

    def _find_language(self, record: Mapping[str, Any], tag: SpeakerTag | None) -> str:
        """Return the language of a tag, of its record, or else of the source.

        Raises:
            RejectRecord: ``malformed`` where it is given and is no text, such as the number of a label.
        """
        for value in (tag and tag.language, record.get("language"), record.get("lang")):
            if names_no_language(value):
                continue
            is_text = isinstance(value, str) and any(map(str.isalpha, value))
            refuse_record((not is_text, "malformed", f"language is {str(value)[:40]!r}, not a text such as 'en'"))
            return canonical_name(str(value))
        return self.language

    def origin(self, record: Mapping[str, Any]) -> str:
        """Return what makes the tag of a record: ``template``, ``tag``, ``name`` (a plain one), or ``none``."""
        if self.template:
            return "template"
        speaker = record.get("speaker")
        tag = find_tag(speaker)
        if is_missing(tag.speaker if tag else speaker):
            return "none"
        return "tag" if tag else "name"


def find_tag(speaker: Any) -> SpeakerTag | None:
    """Return the tag that a value is, or None for any other value.

    Names with blanks are made canonical, and placeholders are "".

    Raises:
        RejectRecord: ``bad_speaker`` where it begins and ends as a tag and is none.
    """
    match = _TAG.fullmatch(speaker) if isinstance(speaker, str) else None
    if match is None:
        return None
    try:
        return _without_placeholders(parse_speaker_tag(speaker))
    except RejectRecord:
        # A name with a blank: each part goes on up to the next word with a colon.
        pairs = [part.partition(":") for part in re.split(r"(?<!\s)\s+(?=[^\s:]+:)", match[1].strip())]
        words = [f"{name}:{canonical_name(value)}" for name, colon, value in pairs if colon and value.strip()]
        if len(words) < len(pairs):
            raise
        return _without_placeholders(parse_speaker_tag(f"| {' '.join(words)} |"))


@lru_cache(maxsize=1 << 12)
def _without_placeholders(tag: SpeakerTag) -> SpeakerTag:
    language = "" if names_no_language(tag.language) else tag.language
    dataset, speaker = ("" if is_missing(name) else name for name in (tag.dataset, tag.speaker))
    return SpeakerTag(language, dataset, speaker, tag.further)


def canonical_name(name: str) -> str:
    """Return a name as a tag can have it, without merging two: blanks become ``_`` with a hash of the name behind.

    >>> canonical_name("anna"), canonical_name("Anna Lee")
    ('anna', 'Anna_Lee-f033b8597f4510de')
    """
    words = name.split()
    if len(words) < 2:
        return name.strip()
    return f"{'_'.join(words)}-{xxhash.xxh3_64_hexdigest(name.strip().encode())}"
