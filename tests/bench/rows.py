"""Framework of the benchmarks: a row alternates two ways of the same work, and a table shows the results.

Each run measures wall time, and the processor time (user and system) of this process and its children. Since other
work on the machine distorts times, a ratio compares the two runs of one round, and the figure of a row is the median
over its rounds.
"""

import operator
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sharmill.models.memory import measure_peak

Way = Callable[[], Mapping[str, float] | None]
_COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


def records(default: int = 1_000_000) -> int:
    """Return the number of records in the rows of the group ``scale`` (``--records``)."""
    return int(os.environ.get("BENCH_RECORDS", default))


def with_peak(work: Callable[[], object]) -> dict[str, float]:
    """Do some work, and return the peak memory that it adds to this process."""
    return {"MiB above": measure_peak(work, "cpu") / 2**20}


@dataclass(frozen=True, kw_only=True)
class Case:
    """The two ways of a row, with their data.

    Args:
        amount: the amount of work of one run, in ``unit``.
        ours: does the work once; may return further figures.
        baseline: does the same work with the libraries alone; None without a comparison.
        by: the time that the ratio compares.
        before: called before each run, outside the measured time.
    """

    amount: float
    unit: str
    ours: Way
    baseline: Way | None = None
    by: Literal["processor", "wall"] = "processor"
    before: Callable[[], object] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    Args:
        what: the work, in a sentence.
        make: makes the data of a case in a folder, tiny data for tests.
        group: ``reach`` runs by default, other groups on request. Rows of ``scale`` take minutes, so they run once,
            without a warm-up.
        baseline: the name of the baseline.
        targets: limits such as ``<= 1.15`` by figure: ``ratio``, ``wall``, ``system share`` of the processor time, or a
            figure that the way returns.
        inverse: the ratio is our time divided by the baseline's, as for an overhead, rather than the speedup.
    """

    name: str
    what: str
    make: Callable[[Path, bool], Case]
    group: str
    baseline: str
    targets: Mapping[str, str]
    inverse: bool


ROWS: dict[str, Row] = {}


def row(
    name: str,
    *,
    baseline: str = "",
    targets: Mapping[str, str] | None = None,
    inverse: bool = False,
    group: str = "reach",
) -> Callable[[Callable[[Path, bool], Case]], Callable[[Path, bool], Case]]:
    """Register a row for a function that makes its case, and whose docstring describes the work."""

    def register(make: Callable[[Path, bool], Case]) -> Callable[[Path, bool], Case]:
        what = " ".join((make.__doc__ or "").split()).removesuffix(".")
        ROWS[name] = Row(
            name=name, what=what, make=make, group=group, baseline=baseline, targets=targets or {},
            inverse=inverse,
        )  # fmt: skip
        return make

    return register


@dataclass
class Times:
    """Seconds and further figures of the runs of one way."""

    wall: list[float] = field(default_factory=list)
    user: list[float] = field(default_factory=list)
    system: list[float] = field(default_factory=list)
    figures: list[Mapping[str, float]] = field(default_factory=list)

    @property
    def processor(self) -> list[float]:
        return [user + system for user, system in zip(self.user, self.system, strict=True)]

    def add(self, way: Way) -> None:
        """Run a way once."""
        before, started = _usage(), time.perf_counter()
        self.figures.append(way() or {})
        self.wall.append(time.perf_counter() - started)
        for seconds, new, old in zip((self.user, self.system), _usage(), before, strict=True):
            seconds.append(new - old)

    def summary(self) -> dict[str, Any]:
        medians = {name: statistics.median(getattr(self, name)) for name in ("wall", "processor", "system")}
        runs = {"wall": self.wall, "user": self.user, "system": self.system}
        figures = {name: statistics.median(one[name] for one in self.figures) for name in self.figures[0]}
        return {**medians, "runs": runs, "figures": figures}


def _usage() -> tuple[float, float]:
    """Return the user and system seconds of this process and of its ended children."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime for one in both), sum(one.ru_stime for one in both)


def measure(
    row: Row, folder: Path, *, repeats: int = 5, warm_up: int = 1, seconds: float = 30.0, tiny: bool = False
) -> dict[str, Any]:
    """Make the data of a row in ``folder``, alternate both ways, and return the figures.

    Args:
        repeats: largest number of rounds after the warm-up; only the first may start after ``seconds``.
    """
    case = row.make(folder, tiny)
    ways = {"ours": case.ours} | ({"baseline": case.baseline} if case.baseline else {})
    times = {name: Times() for name in ways}
    if row.group == "scale":
        repeats, warm_up = 1, 0

    def run_round(times: dict[str, Times]) -> None:
        for name, way in ways.items():
            case.before()
            times[name].add(way)

    for _ in range(warm_up):
        run_round({name: Times() for name in ways})
    started = time.perf_counter()
    for number in range(repeats):
        if number == 0 or time.perf_counter() - started < seconds:
            run_round(times)
    found: dict[str, Any] = {"row": row.name, "unit": case.unit, "amount": case.amount, "by": case.by}
    found |= {name: one.summary() for name, one in times.items()}
    if case.baseline:
        rounds = zip(*(getattr(times[name], case.by) for name in ("ours", "baseline")), strict=True)
        ratios = sorted(ours / theirs if row.inverse else theirs / ours for ours, theirs in rounds)
        found |= {"ratio": statistics.median(ratios), "ratios": ratios}
    return found | {"targets": judge(row.targets, found)}


def judge(targets: Mapping[str, str], found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return value, target and success for each figure with a target."""
    ours = found["ours"]
    figures = {"wall": ours["wall"], "system share": ours["system"] / max(1e-9, ours["processor"]), **ours["figures"]}
    if "ratio" in found:
        figures["ratio"] = found["ratio"]
    judged = {}
    for name, target in targets.items():
        comparison, limit = target.split()
        met = _COMPARE[comparison](figures[name], float(limit))
        judged[name] = {"value": figures[name], "target": target, "met": met}
    return judged


HEADER = (
    "| row | compared with | ratio (lowest to highest) | sharmill | baseline | target |\n"
    "|---|---|---|---|---|---|"
)  # fmt: skip


def table_line(row: Row, found: dict[str, Any]) -> str:
    """Return the line of a row in the table."""
    what = f"**{row.name}**: {row.what}"
    if "error" in found:
        return f"| {what} | {found['error']} | | | | |"
    ours, ratio = found["ours"], ""
    if "ratio" in found:
        ratio = f"{found['ratio']:.2f} ({found['ratios'][0]:.2f} to {found['ratios'][-1]:.2f})"
    work = f"{found['amount']:,.4g} {found['unit']}, {found['amount'] / ours[found['by']]:,.4g} a second"
    figures = ", ".join([_times(ours), work, *(f"{name} {value:,.4g}" for name, value in ours["figures"].items())])
    targets = "; ".join(
        f"{name} {one['target']}: {'met' if one['met'] else 'not met'}"
        + ("" if name == "ratio" else f" ({one['value']:.3g})")
        for name, one in found["targets"].items()
    )
    theirs = _times(found["baseline"]) if "baseline" in found else ""
    return f"| {what} | {row.baseline} | {ratio} | {figures} | {theirs} | {targets} |"


def _times(way: dict[str, Any]) -> str:
    return f"{way['processor']:.3f} s of processors ({way['system']:.3f} system), {way['wall']:.3f} s wall"
