"""Similarities that tell voices apart. They follow from the speaker encoder, unless the configuration sets one."""

from typing import Final

from sharmill.config import Config
from sharmill.match.choose import encoder_family, min_similarity
from sharmill.match.config import MatchConfig
from sharmill.voices.config import VoicesConfig

# Share of the distance from the encoder's minimum similarity of a context to 1 by which the mean similarity of the
# clips of a voice is higher, and the similarity of a clip to a wrong voice may be lower. Measured with resemblyzer on
# LibriSpeech.
_MARGIN: Final = 0.2
# The same share for the core of a voice without a label.
_CORE_MARGIN: Final = 0.5


def least_similarity(config: Config) -> float:
    """Return the mean similarity below which the clips of two clusters have different voices.

    This is the encoder's default of ``match.min_similarity``, or its value for an encoder without a default.
    """
    match = config.section(MatchConfig)
    own = encoder_family(match).min_similarity
    return min_similarity(match) if own is None else own


def voice_similarity(config: Config) -> float:
    """Return the minimum mean similarity of the clips of one voice."""
    own, least = config.section(VoicesConfig).similarity, least_similarity(config)
    return own if own is not None else least + _MARGIN * (1 - least)


def core_similarity(config: Config) -> float:
    """Return the minimum mean similarity of the clips of a core; see ``link_cores``. Given labels need no core."""
    similarity, least = voice_similarity(config), least_similarity(config)
    strict = least + _CORE_MARGIN * (1 - least)
    return similarity if config.section(VoicesConfig).labels == "audit" else max(similarity, strict)


def doubtful_similarity(config: Config) -> float:
    """Return the similarity below which two voices differ within a clip, and from which a clip may have a voice."""
    least = least_similarity(config)
    return least - _MARGIN * (1 - least)
