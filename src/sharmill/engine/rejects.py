"""The limit on rejects: a stage stops early when more of its records are rejected than the configuration allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sharmill.engine.unit import Commit
from sharmill.errors import REASONS, FatalError


@dataclass
class RejectLimit:
    """The share of a stage's records that may be rejected, and the rejects counted so far.

    Executors that see every commit call ``add``; ranks that no driver watches call ``check`` with what they read in the
    ledger.

    Attributes:
        stage: the stage's name.
        folder: the stage's folder of rejects, one file a unit.
        expected_in: the number of records of the stage.
    """

    stage: str
    folder: Path
    expected_in: int
    max_fraction: float
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, commits: Iterable[Commit]) -> None:
        """Count the rejects of commits.

        Raises:
            FatalError: there are too many now.
        """
        for commit in commits:
            self.reasons.update(commit.rejects)
        self.check(self.reasons)

    def check(self, reasons: Mapping[str, int]) -> None:
        """Raise FatalError with the three commonest reasons if these are more rejects than are allowed."""
        rejected = sum(reasons.values())
        # A quotient, since 0.29 * 100 is less than 29.
        if rejected == 0 or rejected / self.expected_in <= self.max_fraction:
            return
        commonest = Counter(reasons).most_common(3)
        listed = ", ".join(f"{reason} {count} ({REASONS[reason]})" for reason, count in commonest)
        raise FatalError(
            f"{self.stage} stopped: {rejected} of {self.expected_in} records are rejected, more than "
            f"max_reject_fraction={self.max_fraction:g} allows. Commonest reasons: {listed}. "
            f"See {self.folder}; mend the input or raise max_reject_fraction",
            code="too_many_rejects",
        )
