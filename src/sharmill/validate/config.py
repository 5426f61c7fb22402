"""Keys of the stage ``validate``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sharmill.config import Presence, StageSection, require


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(StageSection):
    """Checks beyond those that the stage ``validate`` always makes."""

    presence: ClassVar[Presence] = "always"

    deep: bool = False
    """Decode all audio as well."""
    recheck_codes: float | str = 0.0
    """Share of the segments to encode again, such as ``0.001`` or ``0.1%``."""
    codec_models: dict[str, str] = field(default_factory=dict)
    """Model of each codec, where it is not the one that made the codes: ``{nano: "nemo:/new/place/model.nemo"}``."""
    against_sources: bool = False
    """Account for every record of the sources: each is in the dataset or among the rejects."""

    def __post_init__(self) -> None:
        require(0 <= self.recheck_share <= 1, "recheck_codes must be a share between 0 and 1, or a percentage")

    @property
    def recheck_share(self) -> float:
        """``recheck_codes`` as a number; -1 where it is none."""
        text = str(self.recheck_codes).strip()
        try:
            return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            return -1.0
