"""Limits of similarity that tell voices apart, derived from the speaker encoder and the configuration."""

from typing import Final

from sharmill.config import Config
from sharmill.match.choose import encoder_family, min_similarity
from sharmill.match.config import MatchConfig
from sharmill.voices.config import VoicesConfig

# Distance of two limits from the encoder's minimum similarity of a context, as a share of the distance from there to 1:
# the clips of a voice must be this much more similar, and a clip may be this much less similar to the voice of another
# group. Measured with resemblyzer on LibriSpeech.
_MARGIN: Final = 0.2
# The same share for the clips of a core, if speakers have no labels.
_CORE_MARGIN: Final = 0.5


def least_similarity(config: Config) -> float:
    """Return the mean similarity below which two clusters have different voices.

    This is the encoder's default of ``match.min_similarity``, or the configured value if the encoder has no default.
    """
    match = config.section(MatchConfig)
    own = encoder_family(match).min_similarity
    return min_similarity(match) if own is None else own


def voice_similarity(config: Config) -> float:
    """Return the minimum mean similarity of the clips of one voice."""
    own, least = config.section(VoicesConfig).similarity, least_similarity(config)
    return own if own is not None else least + _MARGIN * (1 - least)


def core_similarity(config: Config) -> float:
    """Return the minimum mean similarity of the clips of a core; see ``link_cores``. An audit needs no cores."""
    similarity, least = voice_similarity(config), least_similarity(config)
    strict = least + _CORE_MARGIN * (1 - least)
    return similarity if config.section(VoicesConfig).labels == "audit" else max(similarity, strict)


def doubtful_similarity(config: Config) -> float:
    """Return the similarity below which a clip has two voices, and from which it may have another group's voice."""
    least = least_similarity(config)
    return least - _MARGIN * (1 - least)
