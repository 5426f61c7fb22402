"""The configuration keys of a codec."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from sharmill.config import NAME, NAME_RULE, require
from sharmill.registry import CODECS


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """A codec whose codes are added to the dataset."""

    options_of: ClassVar = (CODECS, "model")

    name: str
    """Name of the codes in the dataset, stored in the folder ``codes_<name>``."""
    model: str
    """Model to load: ``nemo:<pretrained name or .nemo file>``, ``transformers:<directory or hub name>`` (EnCodec
    without chunks, DAC, Mimi), or ``builtin``, a small codec that comes with sharmill for first experiments."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the model family, set beside ``model`` in a configuration."""

    def __post_init__(self) -> None:
        require(bool(NAME.fullmatch(self.name)), f"codec name {self.name!r} {NAME_RULE}")
