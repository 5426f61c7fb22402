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


class BrokenDevice(FailedAttempt):
    """A failed attempt after which nothing works on the rank's device in its process: the rank has to be replaced."""


class Overtaken(FailedAttempt):
    """An attempt that publishes nothing, since another rank does: that began the unit once more."""


@dataclass(frozen=True)
class Finished:
    """An executor has done what it was given; ``failures`` are the units that failed for good, by index.

    ``given_up`` names ranks and devices that could not be used, a sentence each. ``on_other_nodes``: ranks may
    have been on others than the driver, which then sees late what they have done.
    """

    failures: dict[int, FailedAttempt] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    on_other_nodes: bool = False


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
    """Outcome of a stage: its totals, or the units that failed, or what was submitted and is not done yet.

    ``given_up`` names ranks and devices that could not be used on the way, a sentence each.
    """

    totals: Totals | None = None
    failures: dict[int, FailedAttempt] = field(default_factory=dict)
    submitted: Submitted | None = None
    given_up: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return True if the stage is done."""
        return self.totals is not None
