"""The speaker tag ``| Language:en Dataset:name Speaker:id |`` that NeMo's text-to-speech data carries."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from sharmill.errors import RejectRecord

_TAG = re.compile(r"^\s*\|(.*)\|\s*$", re.DOTALL)
_TAG_PARTS = ("Language", "Dataset", "Speaker")


@dataclass(frozen=True, slots=True)
class SpeakerTag:
    """The parts of ``| Language:en Dataset:HiFiTTS Speaker:9136_other |``."""

    language: str
    dataset: str
    speaker: str
    further: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the tag in the order and spacing that NeMo asks for."""
        parts = (f"Language:{self.language}", f"Dataset:{self.dataset}", f"Speaker:{self.speaker}", *self.further)
        return f"| {' '.join(parts)} |"


def nemo_language(language: str) -> str:
    """Return the language of a tag as NeMo reads it, in letters, digits and underscores: ``en_US`` for ``en-US``."""
    return re.sub(r"\W", "_", language)


@lru_cache(maxsize=1 << 12)
def parse_speaker_tag(tag: str) -> SpeakerTag:
    """Parse a speaker tag. Those of the last records are kept: mostly the next one has the same.

    Raises:
        RejectRecord: ``bad_speaker`` where it is not of the form ``| Language:.. Dataset:.. Speaker:.. |``.
    """
    match = _TAG.match(tag)
    words = match[1].split() if match else []
    parts = dict(word.split(":", 1) for word in words if ":" in word)
    # A word without a colon is the rest of a name with a blank in it, and two such names may begin alike.
    if not all(parts.get(name) for name in _TAG_PARTS) or not all(":" in word for word in words):
        raise RejectRecord(
            "bad_speaker",
            f"the speaker tag {tag[:100]!r} is not of the form '| Language:en Dataset:name Speaker:id |'",
        )
    further = tuple(word for word in words if word.partition(":")[0] not in _TAG_PARTS)
    return SpeakerTag(parts["Language"], parts["Dataset"], parts["Speaker"], further)


def tagged_speaker(tag: str) -> str:
    """Return the speaker of a tag that sharmill has written, without parsing the rest; others are parsed.

    Raises:
        RejectRecord: as ``parse_speaker_tag``.

    >>> tagged_speaker("| Language:en Dataset:d Speaker:anna |")
    'anna'
    """
    _, _, rest = tag.partition(" Speaker:")
    speaker, end, _ = rest.partition(" ")
    return speaker if speaker and end else parse_speaker_tag(tag).speaker
