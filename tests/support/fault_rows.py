"""Counts of what came of simulated schedules with a fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class FaultRow:
    """What became of all runs that met one fault.

    Attributes:
        times: how often the fault was tried.
        ended: how often each ending occurred.
        equal: how many ended with the bytes of an undisturbed run, after a relaunch where one was needed; None where
            no bytes are made.
        problems: what should not have happened.
    """

    fault: str
    times: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    equal: int | None = 0
    problems: int = 0
    seconds: float = 0.0

    def add(self, ending: str, seconds: float, *, is_equal: bool, is_problem: bool) -> None:
        """Count a run."""
        self.times += 1
        self.ended[ending] += 1
        self.equal = (self.equal or 0) + is_equal
        self.problems += is_problem
        self.seconds += seconds
