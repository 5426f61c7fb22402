"""Keys of a codec in a configuration."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from sharmill.config import NAME, NAME_RULE, require
from sharmill.registry import CODECS


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """One codec whose codes the dataset has."""

    options_of: ClassVar = (CODECS, "model")

    name: str
    """Name of the codes in the dataset: they lie in the folder ``codes_<name>``."""
    model: str
    """Model to load: ``nemo:<pretrained name or .nemo file>``, ``transformers:<directory or hub name>`` (EnCodec
    without chunks, DAC, Mimi), or ``builtin``, a small one that ships with sharmill, for trying out."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the model's family, which a configuration has beside ``model``."""

    def __post_init__(self) -> None:
        require(bool(NAME.fullmatch(self.name)), f"codec name {self.name!r} {NAME_RULE}")
