"""The speaker encoder of the resemblyzer package, as a family of one model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sharmill.models.family import ModelFamily
from sharmill.models.protocols import SpeakerEncoder


@dataclass(frozen=True, kw_only=True)
class Resemblyzer(ModelFamily):
    """``resemblyzer``: the weights come with the package, and its version tells them."""

    packages: ClassVar = ("resemblyzer",)
    modules: ClassVar = ("sharmill.models.resemblyzer_encoder",)
    # Measured on read speech: 99.8 % of pairs of one speaker are at least as similar (10 speakers, 450 pairs), and of
    # pairs of different speakers 0.2 % (10 speakers, 4,500 pairs) and 3.2 % (248 speakers, 30,628 pairs). At 0.6 it is
    # 23 % and 47 %.
    min_similarity: ClassVar = 0.75
    # The same 30,628 pairs.
    strangers: ClassVar = (
        (0.296, 0.0), (0.434, 0.01), (0.477, 0.05), (0.502, 0.1), (0.532, 0.2), (0.555, 0.3), (0.576, 0.4),
        (0.595, 0.5), (0.615, 0.6), (0.637, 0.7), (0.664, 0.8), (0.701, 0.9), (0.732, 0.95), (0.759, 0.975),
        (0.785, 0.99), (0.8, 0.995), (0.821, 0.998), (0.833, 0.999), (0.852, 0.9995), (0.88, 0.9999), (0.9, 1.0),
    )  # fmt: skip

    def resolve(self) -> Path | None:
        self.refuse_target()
        return super().resolve()

    def load(self, device: str) -> SpeakerEncoder:
        self.resolve()
        from sharmill.models.resemblyzer_encoder import ResemblyzerEncoder

        return ResemblyzerEncoder(device)
