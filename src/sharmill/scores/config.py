"""Configuration keys of the stage ``scores``."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from sharmill.config import Above0, StageSection, require
from sharmill.registry import SCORERS


@dataclass(frozen=True, kw_only=True)
class ScorerConfig:
    """A scorer."""

    options_of: ClassVar = (SCORERS, "scorer")

    scorer: str
    """Scorer to run: ``signal``, ``text``, ``speech``, ``dnsmos``, ``mos``, ``squim``, ``utmos:<file or repository>``,
    ``cer:<pretrained name or .nemo file>``, or a scorer of another package."""
    prefix: str = ""
    """Prefix of the names of the columns, to tell two models apart."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the scorer, set beside ``scorer`` in a configuration."""

    @property
    def label(self) -> str:
        """The name of the scorer in messages."""
        return f"{self.prefix}{self.scorer}"


@dataclass(frozen=True, kw_only=True)
class ScoresConfig(StageSection):
    """Scorers that add columns of numbers to a dataset. A list of mappings configures several passes."""

    name: str = ""
    """Name of the pass, if there are several."""
    scorers: list[ScorerConfig]
    """List of scorers: see below."""
    batch_seconds: Above0 = 60.0
    """Audio that is decoded and scored together, in seconds. It limits memory, and may change the last digits of
    models' scores."""

    def __post_init__(self) -> None:
        require(bool(self.scorers), "scorers is empty: name at least one scorer, or remove the section")
