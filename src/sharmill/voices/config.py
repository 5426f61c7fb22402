"""Configuration keys of the stage ``voices``."""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from sharmill.config import Above0, StageSection, require


@dataclass(frozen=True, kw_only=True)
class VoicesConfig(StageSection):
    """Check of the speaker labels, or search for speakers, by the embeddings of ``match.encoder``. The stage runs
    between ``prepare`` and ``match``, which then uses the same embeddings."""

    labels: Literal["audit", "find"] = "audit"
    """``audit`` checks the given speaker groups. ``find`` replaces the speakers by the voices that it finds, which are
    called ``voice-`` and a hash; records then need no speaker."""
    within: Literal["recording", "collection", "all"] = "all"
    """Where ``find`` looks for clips of the same voice: in one recording; in a collection, which is a group of
    ``speaker_key``; or in the whole corpus."""
    action: Literal["report", "reject", "relabel"] = "report"
    """``report`` only lists the findings in ``labels.jsonl``. ``reject`` also rejects clips with a wrong label
    (``wrong_voice``) or with two voices (``mixed_voices``). ``relabel`` corrects the speakers of clips and groups; it
    needs ``speaker_key: speaker``."""
    similarity: Annotated[float, msgspec.Meta(ge=-1, le=1)] | None = None
    """Minimum mean similarity of the clips of one voice. ``null`` adds a fifth of the distance to 1 to
    ``match.min_similarity``: 0.8 for ``resemblyzer``. With ``find``, three clips of a voice must be more similar."""
    window_seconds: Above0 | None = 2.0
    """Length of the windows whose embeddings are compared to find clips with two voices. This takes about as long as
    the embeddings of the clips; ``null`` skips it."""

    def __post_init__(self) -> None:
        require(self.labels == "audit" or self.action != "relabel", "action: relabel needs labels: audit")
        require(self.labels == "find" or self.within == "all", "within needs labels: find")

    def prepared_key(self, speaker_key: str) -> str | None:
        if self.labels == "audit":
            return None
        return {"recording": "(?P<recording>.*)", "collection": speaker_key, "all": "all"}[self.within]
