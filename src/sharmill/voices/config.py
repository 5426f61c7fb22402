"""Configuration keys of the stage ``voices``."""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from sharmill.config import Above0, StageSection, require


@dataclass(frozen=True, kw_only=True)
class VoicesConfig(StageSection):
    """Check of speaker labels, or search for speakers, by embeddings of ``match.encoder``, which ``match`` reuses."""

    labels: Literal["audit", "find"] = "audit"
    """``audit`` checks the speaker groups. ``find`` names each voice that it finds; records need no speaker."""
    within: Literal["recording", "collection", "all"] = "all"
    """Where ``find`` looks for a voice: in a recording, in a ``collection`` (group of ``speaker_key``), or in
    all records."""
    action: Literal["report", "reject", "relabel"] = "report"
    """``reject`` rejects clips with a wrong label (``wrong_voice``) or two voices (``mixed_voices``); ``relabel``
    corrects speakers, and needs ``speaker_key: speaker``."""
    similarity: Annotated[float, msgspec.Meta(ge=-1, le=1)] | None = None
    """Minimum mean similarity of the clips of a voice. ``null`` is the encoder's default of ``match.min_similarity``,
    plus a fifth of its distance to 1."""
    window_seconds: Above0 | None = 2.0
    """Length of the windows that are compared to find clips with two voices; ``null`` skips this search."""

    def __post_init__(self) -> None:
        require(self.labels == "audit" or self.action != "relabel", "action: relabel needs labels: audit")
        require(self.labels == "find" or self.within == "all", "within needs labels: find")

    def prepared_key(self, speaker_key: str) -> str | None:
        if self.labels == "audit":
            return None
        return {"recording": "(?P<recording>.*)", "collection": speaker_key, "all": "all"}[self.within]
