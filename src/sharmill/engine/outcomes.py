"""Outcomes of attempts at units, of the work of an executor, and of stages."""

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
class Finished:
    """An executor has done what it was given; ``failures`` are the units that failed for good, by index."""

    failures: dict[int, FailedAttempt] = field(default_factory=dict)


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
    """Outcome of a stage: its totals, or the units that failed, or what was submitted and is not done yet."""

    totals: Totals | None = None
    failures: dict[int, FailedAttempt] = field(default_factory=dict)
    submitted: Submitted | None = None

    @property
    def ok(self) -> bool:
        """Return True if the stage is done."""
        return self.totals is not None
