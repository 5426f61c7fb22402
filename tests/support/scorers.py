"""A scorer of an own module, whose behaviour for some clips is an option."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sharmill.scores.scorer import Score, Scorer


@dataclass(frozen=True, kw_only=True)
class ToyScorer(Scorer):
    """The peak of a clip, and the number of its samples; clips whose text ends with "1.flac" have a fault."""

    columns: ClassVar = {"toy_peak": (0.0, 1.0), "toy_length": None}

    fault: str = ""
    """What happens."""
    kill: str = ""
    """File at which a rank kills itself, once."""

    def load(self, device: str) -> Score:
        def score(clips):
            if self.kill and any("3.flac" in clip.text for clip in clips) and not Path(self.kill).exists():
                Path(self.kill).touch()
                os.kill(os.getpid(), 9)
            rows = [[float(abs(clip.samples(8000)).max()), len(clip.stored[0])] for clip in clips]
            for row, clip in zip(rows, clips, strict=True):
                if self.fault == "raises everywhere" or (self.fault == "raises" and "1.flac" in clip.text):
                    raise KeyError("no such voice")
                if "1.flac" in clip.text and self.fault in ("nan", "inf", "None"):
                    row[0] = None if self.fault == "None" else float(self.fault)
            return {"nothing": None, "short": rows[1:], "narrow": [row[:1] for row in rows]}.get(self.fault, rows)

        return score


class LacksColumns:
    """No scorer."""
