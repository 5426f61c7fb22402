"""The limit on rejects: a stage stops early when more of its records are rejected than the configuration allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sharmill.engine.reject_examples import describe_rejects
from sharmill.engine.unit import Commit
from sharmill.errors import HARMLESS_REASONS, FatalError


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
    num_in: int = 0

    def add(self, commits: Iterable[Commit]) -> None:
        """Count the rejects of commits.

        Raises:
            FatalError: there are too many now.
        """
        for commit in commits:
            self.reasons.update(commit.rejects)
            self.num_in += commit.num_in
        self.check(self.reasons, self.num_in)

    def check(self, reasons: Mapping[str, int], num_in: int) -> None:
        """Raise FatalError with the commonest reasons if these are more rejects than are allowed.

        Args:
            reasons: how many records were rejected, by reason.
            num_in: how many records were read for that.
        """
        reasons = {reason: count for reason, count in reasons.items() if reason not in HARMLESS_REASONS}
        rejected = sum(reasons.values())
        # A quotient, since 0.29 * 100 is less than 29.
        if rejected == 0 or rejected / self.expected_in <= self.max_fraction:
            return
        # Where nothing is left, a higher limit would only move the error to the next stage.
        remedy = "mend the input" if rejected >= num_in else "mend the input, or raise max_reject_fraction"
        summary = (
            f"{self.stage} stopped: {rejected} of {self.expected_in} records are rejected, more than "
            f"max_reject_fraction={self.max_fraction:g} allows; {remedy}. The commonest reasons (all: {self.folder}):"
        )
        raise FatalError(summary, code="too_many_rejects", details=describe_rejects(self.folder, reasons))
