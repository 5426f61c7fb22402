"""The padding of models' batches: counted in a unit, kept in the stats of its commit, logged when a stage ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_PADDED: Final = "padded_seconds"


@dataclass
class Padding:
    """Audio that went through a model: seconds, and seconds with the padding of its batches."""

    seconds: float = 0.0
    padded: float = 0.0

    def add(self, items: Sequence[np.ndarray], audio: Tensor, sampling_rate: int) -> None:
        """Count a batch: its items (samples,), and the audio (rows, samples) that was made of them."""
        self.seconds += sum(map(len, items)) / sampling_rate
        self.padded += audio.numel() / sampling_rate

    def stats(self, done: str) -> dict[str, float]:
        """Return the stats of a commit; ``done`` is the word for the model's work, such as ``embedded``."""
        return {f"{done}_seconds": self.seconds, _PADDED: self.padded}


def log_padding(stats: Sequence[Mapping[str, Any]], done: str) -> None:
    """Log the padding of all units."""
    seconds, padded = (sum(one[name] for one in stats) for name in (f"{done}_seconds", _PADDED))
    share = 100 * (1 - seconds / padded) if padded else 0.0
    log.info("%.1f s of audio %s, %.2f %% of the batches is padding", seconds, done, share)
