"""Keys of the stage ``prepare``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sharmill.config import Presence, StageSection, require


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(StageSection):
    """Conditions that a record must meet. Records that do not are rejected with a reason."""

    presence: ClassVar[Presence] = "always"

    min_duration: float = 0.1
    """Shortest utterance, in seconds."""
    max_duration: float | None = 600.0
    """Longest utterance, in seconds; ``null`` is no limit. A codec takes an utterance at once, and one of three hours
    needs more than 20 GB of memory."""
    duration_tolerance: float = 0.1
    """Largest difference between the durations in the manifest and in the audio header, in seconds."""
    require_text: bool = True
    """Reject records without text. ``false`` keeps untranscribed speech."""
    filters: dict[str, str] = field(default_factory=dict)
    """Comparisons of manifest keys with numbers, such as ``{cer: "<= 0.03", bandwidth: ">= 8000"}``."""
    unit_records: int = 2000
    """Number of records in one unit of work."""

    def __post_init__(self) -> None:
        require(self.min_duration >= 0, "min_duration must not be negative")
        require(self.max_duration is None or self.max_duration > self.min_duration,
                 "max_duration must be greater than min_duration")  # fmt: skip
        require(self.duration_tolerance >= 0, "duration_tolerance must not be negative")
        require(self.unit_records > 0, "unit_records must be positive")
