"""Speaker tags: a record's own tag, or one built from a plain name or a template.

A template is a text with fields for keys of the record and parts of its path. Placeholders such as ``N/A`` count as
missing values in every source.
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

# ISO 639 code for an undetermined language, and the speaker name of a record without a speaker.
UNDETERMINED: Final = "und"
NO_SPEAKER: Final = "unknown"
# Placeholders for an unknown value, as written by pandas, R, SQL, Python and corpora, in upper or lower case and with
# any punctuation around them. Placeholders of several words are also recognized in the form that ``canonical_name``
# returns.
_PLACEHOLDER: Final = re.compile(
    r"n[/.]?a|nan|nil|null|(?:(?:speaker|spkr?)[\W_]*)?"
    r"(?:none|unk|unknown|undefined|unspecified|unidentified|anonymous)(?:[\W_]*(?:speaker|spkr?))?(?:-[0-9a-f]{16})?|",
    re.IGNORECASE,
)
_MARKS: Final = string.punctuation + string.whitespace + "\u2013\u2014\u2026"
# Some language codes look like the shortest placeholders: "na" is Nauruan, and "nan" is Min Nan.
_LANGUAGE_CODE: Final = re.compile(r"\s*[a-z]{2,3}\s*")
_TAG: Final = re.compile(r"\s*\|(.*)\|\s*", re.DOTALL)
_FIELD: Final = re.compile(r"\{(?P<key>[^{}\[\]:]+)(?:\[(?P<index>-?\d+)\])?(?P<prefix>:prefix)?\}")


def is_missing(value: Any) -> bool:
    """Return True if a value is None or a placeholder for a missing value.

    >>> [is_missing(value) for value in ("N/A", "<unk>", "-", "", -1, math.nan, None)]
    [True, True, True, True, True, True, True]
    >>> [is_missing(value) for value in ("84", "Nan", "nana", 0)]
    [False, False, False, False]
    """
    if isinstance(value, str):
        text = value.strip()
        # Capitalized like this, these words may be names of people.
        is_name = text in ("Na", "Nan", "Nil", "Null")
        # -1 is Hugging Face's number for a missing label, and \N stands for NULL in SQL dumps.
        is_mark = text in ("-1", "-1.0", r"\N")
        return is_mark or (not is_name and _PLACEHOLDER.fullmatch(text.strip(_MARKS)) is not None)
    return value is None or value == -1 or (isinstance(value, float) and math.isnan(value))


def names_no_language(value: Any) -> bool:
    """Return True if a value is missing and is not an ISO 639 code such as ``nan``."""
    return is_missing(value) and not (isinstance(value, str) and _LANGUAGE_CODE.fullmatch(value))


@dataclass(frozen=True)
class Template:
    """A text with fields, which are replaced by values of a record, parts of values, or parts of the audio's path.

    Parts of a value are separated by - or _. ``:prefix`` takes the first part of a value or of a part of the path.

    >>> Template("{path[0]}_{session}").fill({"session": 3}, "anna/one.wav")
    'anna_3'
    >>> Template("{id[0]}-{id[1]}").fill({"id": "10148_10119_000000"}, "one.wav")
    '10148-10119'
    >>> Template("{path[-1]:prefix}").fill({}, "test/1688-142285-0000.flac")
    '1688'

    Raises:
        ValueError: the text is not a valid template.
    """

    text: str

    def __post_init__(self) -> None:
        for field in _FIELD.finditer(self.text):
            is_field = field["key"] != "path" or field["index"] is not None
            require(is_field, f"{field[0]} in the template {self.text!r} is not a field; write {{key}} or {{path[0]}}")
        is_whole = not set("{}") & set(_FIELD.sub("", self.text))
        fields = "possible fields are {key}, {key[0]}, {key:prefix} and {path[0]}"
        require(is_whole, f"the template {self.text!r} is not valid; {fields}")
        require(self.text.strip() != "", "the template is empty; leave the key out")

    @cached_property
    def keys(self) -> list[str]:
        """The keys of records that the template uses."""
        return [field["key"] for field in _FIELD.finditer(self.text) if field["key"] != "path"]

    def fill(self, record: Mapping[str, Any], path: str) -> str:
        """Return the text for a record whose audio is at ``path``; raise ValueError if a field has no value."""

        def value(field: re.Match[str]) -> str:
            is_path = field["key"] == "path"
            text = _part_of(path, int(field["index"])) if is_path else name_of(record.get(field["key"]))
            index = 0 if field["prefix"] else None if is_path or field["index"] is None else int(field["index"])
            if index is not None and text is not None:
                text = _pick(re.split("[-_]", text), index)
            if not text:
                place = (
                    f"the path {path!r} does not have" if is_path else "is missing in the record, or is a placeholder"
                )
                raise ValueError(f"the template uses {field[0]}, which {place}")
            return text

        return _FIELD.sub(value, self.text)


def _part_of(path: str, index: int) -> str | None:
    """Return a part of a path, without the suffix if it is the last part; None if the index is out of range."""
    parts = path.split("/")
    stem, dot, _ = parts[-1].rpartition(".")
    parts[-1] = stem if stem and dot else parts[-1]
    return _pick(parts, index)


def _pick(parts: list[str], index: int) -> str | None:
    return parts[index] if -len(parts) <= index < len(parts) else None


def name_of(value: Any) -> str | None:
    """Return a text or integer as a name without surrounding whitespace; None for any other value."""
    # Integers of more than 64 bits are not names, and Python limits their conversion to text.
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63):
        return str(value).strip()
    return None


@dataclass(frozen=True)
class SpeakerRule:
    """The rule that determines the speaker tag of each record of a source.

    Args:
        template: template of the name; None to use the record's own speaker.
        language, dataset: values for records that have none.
    """

    template: Template | None
    language: str
    dataset: str

    def make_tag(self, record: Mapping[str, Any], path: str, nameless: str | None = None) -> SpeakerTag | None:
        """Return the tag of a record whose audio is at ``path`` below its root.

        A record without a speaker gets the name ``nameless``. If ``nameless`` is None, it gets no tag: None is
        returned.

        Raises:
            RejectRecord: ``bad_speaker`` if the record's speaker is not a name, or a field of the template has no
                value; ``malformed`` if its language is not a text.
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
            raise RejectRecord("bad_speaker", f"speaker is {shown}, which is not a name")
        return SpeakerTag(
            self._find_language(record, tag),
            (tag and tag.dataset) or self.dataset,
            canonical_name(name),
            tag.further if tag else (),
        )

    def _find_language(self, record: Mapping[str, Any], tag: SpeakerTag | None) -> str:
        """Return the language from the tag, otherwise from the record, otherwise from the source.

        Raises:
            RejectRecord: ``malformed`` if the language is not a text but, for example, the number of a label.
        """
        for value in (tag and tag.language, record.get("language"), record.get("lang")):
            if names_no_language(value):
                continue
            is_text = isinstance(value, str) and any(map(str.isalpha, value))
            refuse_record((not is_text, "malformed", f"language is {str(value)[:40]!r}, not a text such as 'en'"))
            return canonical_name(str(value))
        return self.language

    def origin(self, record: Mapping[str, Any]) -> str:
        """Return the origin of a record's tag: ``template``, ``tag``, ``name`` (a plain name), or ``none``."""
        if self.template:
            return "template"
        speaker = record.get("speaker")
        tag = find_tag(speaker)
        if is_missing(tag.speaker if tag else speaker):
            return "none"
        return "tag" if tag else "name"


def find_tag(speaker: Any) -> SpeakerTag | None:
    """Return the parsed speaker tag if a value is one, otherwise None.

    Names with blanks are replaced by canonical names, and placeholders by "".

    Raises:
        RejectRecord: ``bad_speaker`` if the value begins and ends like a tag but is not valid.
    """
    match = _TAG.fullmatch(speaker) if isinstance(speaker, str) else None
    if match is None:
        return None
    try:
        return _without_placeholders(parse_speaker_tag(speaker))
    except RejectRecord:
        # A name may contain blanks: it extends to the next word with a colon.
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
    """Return a name without blanks, as tags require: blanks become ``_``, and a hash keeps different names distinct.

    >>> canonical_name("anna"), canonical_name("Anna Lee")
    ('anna', 'Anna_Lee-f033b8597f4510de')
    """
    words = name.split()
    if len(words) < 2:
        return name.strip()
    return f"{'_'.join(words)}-{xxhash.xxh3_64_hexdigest(name.strip().encode())}"
