"""What a person sees: progress bars while stages run, and the closing lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sharmill.cli.terminal import plain
from sharmill.engine.run import StageResult
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.engine.worker import FailedAttempt
from sharmill.executors.logs import printable
from sharmill.pipeline import DatasetResult
from sharmill.validate.report import INDEX, Report

_MAX_LINES = 10
_MAX_EXAMPLES = 3
_MAX_CHARACTERS = 160
_SHOWN_COUNTS = ("shards", "cuts", "files", "bytes", "items heard", "seconds decoded", "segments encoded again",
                 "codes compared", "codes that differ")  # fmt: skip


class ProgressListener:
    """A bar per stage with hours done, rate and time left; plain lines where the output is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description:<18}"),
            BarColumn(),
            TextColumn("{task.fields[units]} units, {task.fields[hours]}, {task.fields[rejects]} rejects"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._counts_audio = True
        self._units = (0, 0)
        self._rejects = 0

    def __enter__(self) -> ProgressListener:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, traceback)

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        costs = {unit.index: unit.cost for unit in units}
        self._counts_audio = stage.name != "prepare"
        self._units = (len(done), len(units))
        self._rejects = sum(commit.num_rejected for commit in done)
        self._task = self._progress.add_task(stage.name, total=sum(costs.values()) or 1, units="", hours="", rejects=0)
        self._advance(sum(costs[commit.index] for commit in done))

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        self._units = (self._units[0] + 1, self._units[1])
        self._rejects += commit.num_rejected
        self._advance(unit.cost)

    def unit_failed(self, unit: Unit, error: FailedAttempt, attempts: int) -> None:
        line = plain(f"unit {unit.index} failed {attempts} times: {error.message}", style="red")
        self._console.print(line)

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        if self._task is None:
            return
        if result.totals is not None:
            self._rejects = result.totals.num_rejected
            task = self._progress.tasks[self._task]
            self._advance((task.total or 0) - task.completed)
        self._progress.stop_task(self._task)

    def _advance(self, cost: float) -> None:
        assert self._task is not None
        self._progress.advance(self._task, cost)
        task = self._progress.tasks[self._task]
        self._progress.update(
            self._task,
            units=f"{self._units[0]}/{self._units[1]}",
            hours=self._describe(task.completed, task.total or 0, task.elapsed or 0),
            rejects=self._rejects,
        )

    def _describe(self, done: float, total: float, seconds: float) -> str:
        if not self._counts_audio:
            return f"{done:.0f}/{total:.0f} records"
        rate = f", {done / seconds:.0f} x real time" if seconds > 1 else ""
        return f"{done / 3600:.2f}/{total / 3600:.2f} h{rate}"


def print_result(console: Console, result: DatasetResult) -> None:
    """The summary of a run over one dataset: accounts by stage, rejects by reason, failed units."""
    table = Table(title=plain(result.config.name), title_justify="left")
    for column in ("stage", "in", "out", "rejected", "hours out"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    reasons: Counter[str] = Counter()
    for stage, outcome in result.stages:
        if outcome.totals is None:
            table.add_row(plain(stage.name), "", "", "", plain("failed", style="red"))
            continue
        totals = outcome.totals
        reasons.update(totals.rejects)
        numbers = (f"{totals.num_in}", f"{totals.num_out}", f"{totals.num_rejected}", f"{totals.hours:.3f}")
        table.add_row(plain(stage.name), *numbers)
    console.print(table)
    if reasons:
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        console.print(plain(f"rejects: {listed} (see {result.config.run_dir}/rejects.jsonl)"))
    for stage, outcome in result.stages:
        for error in list(outcome.failures.values())[:_MAX_LINES]:
            console.print(plain(f"{stage.name}: unit {error.index} failed: {error.message}", style="red"))
        if outcome.failures:
            sentence = f"tracebacks: {stage.dir.failures}; run the same command again to retry what failed"
            console.print(plain(sentence))


def print_report(console: Console, report: Report) -> None:
    """A table of findings by kind, with the first examples, and what was checked, could not be, and mends it."""
    checked = ", ".join(f"{report.checked[name]:,.0f} {name}" for name in _SHOWN_COUNTS if name in report.checked)
    if not report.findings:
        console.print(plain("validation: no findings", style="green"))
    else:
        table = Table(title=f"validation: {report.errors} errors, {report.warnings} warnings", title_justify="left")
        for column in ("finding", "severity", "count", "first examples", "what to do"):
            table.add_column(column, overflow="fold")
        for kind in report.kinds:
            examples = islice((row for row in report.findings if row["code"] == kind.code), _MAX_EXAMPLES)
            style = "red" if kind.severity == "error" else "yellow"
            table.add_row(
                plain(kind.code), plain(kind.severity, style=style), f"{kind.count}",
                plain("\n".join(_describe_finding(row) for row in examples)), plain(kind.to_do),
            )  # fmt: skip
        console.print(table)
    console.print(plain(f"checked: {checked}"))
    for phrase in report.unchecked:
        console.print(plain(f"not checked: {phrase}"))
    if report.redo:
        units = Counter(unit.stage for unit in report.redo)
        listed = ", ".join(stage if stage == INDEX else f"{count} of {stage}" for stage, count in units.items())
        console.print(plain(f"to be done again by --redo: {listed}"))


def _describe_finding(row: dict[str, Any]) -> str:
    shard = "" if row["shard"] is None else f"shard {row['shard']}, "
    text = printable(f"{shard}{row['where']}: {row['sentence']}")
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
