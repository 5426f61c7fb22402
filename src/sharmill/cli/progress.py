"""Progress of the stages of a run, as a listener of the engine shows it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sharmill.cli.console import plain
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import FailedAttempt, StageResult
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit


class ProgressListener(Listener):
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
        self._counts_audio = stage.cost_unit == "seconds of audio"
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
