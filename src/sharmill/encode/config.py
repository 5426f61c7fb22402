"""Keys of the stage ``encode``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sharmill.config import Above0, Precision, Presence, StageSection, require
from sharmill.models.config import CodecConfig


@dataclass(frozen=True, kw_only=True)
class EncodeConfig(StageSection):
    """Codecs whose codes the dataset has, side by side."""

    presence: ClassVar[Presence] = "always"

    codecs: list[CodecConfig] = field(default_factory=lambda: [CodecConfig(name="builtin", model="builtin")])
    """List of codecs; each has the keys below."""
    batch_seconds: Above0 = 20.0
    """Audio in one batch of a codec, in seconds, padding included. On a CPU no batch has more than 10 s. By default a
    batch of NeMo's codecs fits in 16 GiB in fp32, in which cuDNN takes 625 MiB per second."""
    precision: Precision = "fp32"
    """Arithmetic of the codecs, as for ``match``. Any but ``fp32`` changes codes; ``dataset.json`` names it."""

    canonical_shapes: bool = False
    """Pad every segment to one of a few lengths, in batches of one size for each, so that its codes do not depend on
    its neighbours; on a GPU the last batch of each length is filled up with silence. Codecs whose codes depend on
    padding take segments one by one."""
    unit_seconds: Above0 | None = None
    """Audio in one unit of work, in seconds; ``null`` chooses for about 64 units, between 60 s and two hours each."""

    def __post_init__(self) -> None:
        names = [codec.name for codec in self.codecs]
        require(len(set(names)) == len(names), "two codecs have the same name")

    def items(self, kind: str) -> Sequence[Any]:
        # The segments of a dataset serve all codecs.
        return [self][: len(self.codecs)] if kind == "encode.segments" else self.codecs
