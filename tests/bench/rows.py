"""The frame of the benchmarks: a row does one work in two ways, in turn, and measures both.

What is measured of each run: wall time, and the processor time (user and system) of this process and its children.
Since other work on the machine distorts times, a ratio is that of the two runs of one round, and the figure of a row
the median over its rounds.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Way = Callable[[], Mapping[str, float] | None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The two ways of a row, over data that is made.

    Args:
        amount: of the work that one run does, in ``unit``.
        ours: does the work once; may return further figures.
        baseline: does the same as a user of the libraries would; None where there is nothing to compare with.
        by: the time that the ratio is of.
        before: called before each run, with the time not counted.
    """

    amount: float
    unit: str
    ours: Way
    baseline: Way | None = None
    by: Literal["processor", "wall"] = "processor"
    before: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        make: makes the data of a case below a folder; a tiny one for the tests.
        baseline: the name of what it is compared with.
        target: of the ratio.
        inverse: the ratio is ours over the baseline, as of a share or an overhead, and not the times as fast.
    """

    name: str
    make: Callable[[Path, bool], Case]
    baseline: str
    target: str
    inverse: bool


ROWS: dict[str, Row] = {}


def row(
    name: str, *, baseline: str = "", target: str = "", inverse: bool = False
) -> Callable[[Callable[[Path, bool], Case]], Callable[[Path, bool], Case]]:
    """Make a row of a function that makes its case."""

    def register(make: Callable[[Path, bool], Case]) -> Callable[[Path, bool], Case]:
        ROWS[name] = Row(name, make, baseline, target, inverse)
        return make

    return register


@dataclass
class Times:
    """The runs of one way: seconds of each, and the further figures of the last."""

    wall: list[float] = field(default_factory=list)
    user: list[float] = field(default_factory=list)
    system: list[float] = field(default_factory=list)
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def processor(self) -> list[float]:
        return [user + system for user, system in zip(self.user, self.system, strict=True)]

    def add(self, way: Way) -> None:
        """Run a way once."""
        before, started = _usage(), time.perf_counter()
        self.figures = way() or {}
        self.wall.append(time.perf_counter() - started)
        for seconds, new, old in zip((self.user, self.system), _usage(), before, strict=True):
            seconds.append(new - old)

    def summary(self) -> dict[str, Any]:
        medians = {name: statistics.median(getattr(self, name)) for name in ("wall", "processor", "system")}
        return {**medians, "runs": {"wall": self.wall, "user": self.user, "system": self.system}, **self.figures}


def _usage() -> tuple[float, float]:
    """User and system seconds of this process and of its children that have ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime for one in both), sum(one.ru_stime for one in both)


def measure(row: Row, folder: Path, *, repeats: int = 5, warm_up: int = 1, tiny: bool = False) -> dict[str, Any]:
    """Make the data of a row in ``folder``, run both ways in turn, and return the figures."""
    case = row.make(folder, tiny)
    ways = {"ours": case.ours} | ({"baseline": case.baseline} if case.baseline else {})
    times = {name: Times() for name in ways}
    for number in range(warm_up + repeats):
        for name, way in ways.items():
            case.before()
            (times[name] if number >= warm_up else Times()).add(way)
    found: dict[str, Any] = {"row": row.name, "unit": case.unit, "amount": case.amount, "by": case.by}
    found |= {name: one.summary() for name, one in times.items()}
    if case.baseline:
        rounds = zip(*(getattr(times[name], case.by) for name in ("ours", "baseline")), strict=True)
        ratios = [ours / theirs if row.inverse else theirs / ours for ours, theirs in rounds]
        found["ratio"] = statistics.median(ratios)
        found["ratios"] = sorted(ratios)
    return found
