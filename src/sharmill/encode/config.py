"""Configuration keys of the stage ``encode``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sharmill.config import Above0, Precision, Presence, StageSection, require
from sharmill.models.config import CodecConfig


@dataclass(frozen=True, kw_only=True)
class EncodeConfig(StageSection):
    """Codecs that encode the dataset; codes of several codecs are stored side by side."""

    presence: ClassVar[Presence] = "always"

    codecs: list[CodecConfig] = field(default_factory=lambda: [CodecConfig(name="builtin", model="builtin")])
    """List of codecs; each has the keys below."""
    batch_seconds: Above0 = 20.0
    """Audio in one batch of a codec, in seconds, including padding; at most 10 s on a CPU. With the default, a batch of
    NeMo's codecs fits into 16 GiB in fp32."""
    precision: Precision = "fp32"
    """Arithmetic of the codecs, as for ``match``. Values other than ``fp32`` change codes."""

    canonical_shapes: bool = False
    """Pad every segment to one of a few lengths, each with a fixed batch size, so that a segment's codes do not depend
    on its neighbours. On a GPU, silence fills the last batch of each length."""
    unit_seconds: Above0 | None = None
    """Audio per unit of work in seconds; ``null`` chooses about 64 units of 60 s to two hours each."""

    def __post_init__(self) -> None:
        names = [codec.name for codec in self.codecs]
        require(len(set(names)) == len(names), "two codecs have the same name: rename one of them")

    def items(self, kind: str) -> Sequence[Any]:
        # All codecs share one list of segments.
        return [self][: len(self.codecs)] if kind == "encode.segments" else self.codecs
