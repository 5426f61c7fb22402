"""Outcomes of attempts at units and of stages."""

from __future__ import annotations

from dataclasses import dataclass, field

from sharmill.engine.unit import Totals


@dataclass(frozen=True)
class FailedAttempt:
    """Why an attempt at a unit failed: one line, and the traceback or the signal."""

    index: int
    message: str
    traceback: str


@dataclass(frozen=True)
class Submitted:
    """An executor has submitted ranks and, behind them, a job that goes on when they have ended.

    Attributes:
        message: one sentence that says so.
        jobs: the numbers of all these jobs.
    """

    message: str
    jobs: list[str]


@dataclass(frozen=True)
class StageResult:
    """Outcome of a stage, or of the work of an executor on it.

    Attributes:
        totals: the accounts of a stage that is done.
        failures: the units that failed for good, by index.
        submitted: what was submitted and is not done yet.
        given_up: names ranks and devices that could not be used on the way, a sentence each.
    """

    totals: Totals | None = None
    failures: dict[int, FailedAttempt] = field(default_factory=dict)
    submitted: Submitted | None = None
    given_up: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return True if the stage is done."""
        return self.totals is not None
