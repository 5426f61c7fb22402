"""Keys of speaker groups: the groups of utterances among which a context may be chosen.

A key is made from the path of the audio file or from the name in the speaker tag, which ``sharmill.manifest`` parses.
The preset ``speaker`` and user-defined patterns are case-sensitive: ``S1`` and ``s1`` are two speakers. The other
presets give the keys of NeMo's ``extend_nemo_manifest_with_context_audio.py``, in lower case.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import Utterance, tagged_speaker
from sharmill.registry import nearest
from sharmill.sources.speakers import is_missing

_MOST: Final = 0.5
_MANY_RECORDINGS: Final = 20

SpeakerKey = Callable[[str, str], str]
"""A function that returns the key from the relative path of the audio and the speaker's name in the tag; it may raise
RejectRecord.
"""


def key_of(speaker_key: SpeakerKey, utterance: Utterance) -> str:
    """Return the group key of an utterance that has passed the checks."""
    return speaker_key(utterance.segment.audio_filepath, tagged_speaker(utterance.speaker))


@dataclass(frozen=True)
class PathPattern:
    """A speaker key made from the named groups of a regular expression, in order of appearance.

    Args:
        pattern: the expression, which is searched for in the relative path.
        layout: a description of the expected paths, for messages.
        separator: the text between the values in the key.
        fold_case: convert the key to lower case.
    """

    pattern: re.Pattern[str]
    layout: str
    separator: str
    fold_case: bool = False

    def __call__(self, audio_filepath: str, speaker: str) -> str:
        match = self.pattern.search(audio_filepath)
        if match is None:
            raise RejectRecord("bad_speaker", f"the path {audio_filepath!r} does not match {self.layout}")
        values = match.groupdict()  # in order of appearance
        for name, value in values.items():
            if value is None:
                raise RejectRecord(
                    "bad_speaker", f"the group {name!r} of {self.layout} matches nothing in {audio_filepath!r}"
                )
        if all(map(is_missing, values.values())):
            raise RejectRecord(
                "bad_speaker",
                f"{self.layout} finds {', '.join(values.values())!r} in {audio_filepath!r}, which names no speaker",
            )
        key = self.separator.join(values.values())
        return key.lower() if self.fold_case else key


def _speaker_of_tag(audio_filepath: str, speaker: str) -> str:
    """Return the speaker's name; the path of the audio is ignored."""
    if not speaker.strip():
        raise RejectRecord("bad_speaker", f"the speaker tag of {audio_filepath!r} names no speaker")
    return speaker


def _speaker_in_any_case(audio_filepath: str, speaker: str) -> str:
    """Return the speaker's name in lower case; the path of the audio is ignored."""
    return _speaker_of_tag(audio_filepath, speaker).lower()


def _whole_corpus(audio_filepath: str, speaker: str) -> str:
    """Return the same key for all records."""
    return "all"


def needs_speaker(key: SpeakerKey) -> bool:
    """Return True if a key is made from the name of the speaker, so that a record without a name has no group."""
    return key in (_speaker_of_tag, _speaker_in_any_case)


def is_doubtful(share: float, num_recordings: int) -> bool:
    """Return True if a name may stand for many speakers, because many recordings and most records have it."""
    return share > _MOST and num_recordings >= _MANY_RECORDINGS


def _layout(layout: str, pattern: str) -> PathPattern:
    """Return the preset for a published path layout. Its keys are NeMo's: lower-case values joined by "_"."""
    return PathPattern(re.compile(pattern), layout, "_", fold_case=True)


PRESETS: Final[dict[str, SpeakerKey]] = {
    "speaker": _speaker_of_tag,
    "all": _whole_corpus,
    "librispeech": _layout(
        "<speaker>-<chapter>-<utterance>.<extension>",
        r"(?:^|/)(?P<speaker>[^/-]+)-(?P<chapter>[^/-]+)-[^/-]+$",
    ),
    # The published scripts have the same rule under two names.
    **dict.fromkeys(
        ("libritts", "librittsDevClean"),
        _layout(
            "<subset>/<speaker>/<chapter>/<file>",
            r"^(?P<subset>[^/]+)/(?P<speaker>[^/]+)/(?P<chapter>[^/]+)/[^/]",
        ),
    ),
    "hifitts": _layout(
        "<speaker>_<quality>/<book>/<chapter>_<segment>.<extension>",
        r"^(?P<speaker>[^/]+_[^/]+)/(?P<book>[^/]+)/(?:.*/)?(?P<chapter>[^/]+)_[^/_]+$",
    ),
    "hifitts2": _layout(
        "<speaker>_<book>_<chapter>_<segment>.<extension>",
        r"(?:^|/)(?P<chapter>[^/]+)_[^/_]+$",
    ),
    "nvyt2505": _speaker_in_any_case,
    "rivaLindyRodney": _layout(
        "<speaker>/<rate>/<emotion>/<file>",
        r"^(?P<speaker>[^/]+)/[^/]+/(?P<emotion>[^/]+)/[^/]",
    ),
    "rivaEmmaMeganSeanTom": _layout(
        "<speaker>/<rate>/<speaker>_<emotion>_<utterance>.<extension>",
        r"^[^/]+/[^/]+/(?P<emotion>[^/]+)_[^/_]+(?:/|$)",
    ),
    "jhsdGtc20Amp20Keynote": _layout(
        "<event>_<microphone>_<utterance>.<extension>",
        r"(?:^|/)(?P<event>[^/]+)_[^/_]+_[^/_]+$",
    ),
}


def make_speaker_key(spec: str) -> SpeakerKey:
    """Return the function that makes group keys.

    Args:
        spec: the name of a preset, in any case, or a regular expression with named groups. The expression is searched
            for in the relative path, and the key consists of the values of its groups, joined by "/". All presets
            except ``speaker`` and ``all`` are published rules, whose keys are in lower case.

    Returns:
        A picklable function of the relative path and the speaker's name in the tag. It raises
        ``RejectRecord("bad_speaker")`` for a path that does not match.

    Raises:
        ConfigError: the preset is unknown, or the regular expression is invalid or has no named groups.

    Example:
        >>> make_speaker_key("librispeech")("train/84/121123/84-121123-0001.flac", "84")
        '84_121123'
        >>> make_speaker_key(r"^(?P<house>[^/]+)/(?P<voice>[^/]+)/")("North/Anna/1.wav", "anna")
        'North/Anna'
    """
    presets = {name.lower(): key for name, key in PRESETS.items()}
    if spec.lower() in presets:
        return presets[spec.lower()]
    problem = f"is neither a preset nor a regular expression with named groups{nearest(spec, list(PRESETS))}"
    if re.search(r"[][()^$*+?|\\/]", spec):
        problem = "is a pattern without named groups; write each part of the key as (?P<name>...)"
        try:
            pattern = re.compile(spec)
            if pattern.groupindex:
                return PathPattern(pattern, f"the pattern {spec!r}", "/")
        except re.error as error:
            if "(?P<" in spec:
                problem = f"is not a valid regular expression ({error}); correct it, or use a preset"
    raise ConfigError(f"speaker_key: {spec!r} {problem}", code="bad_config_value")
