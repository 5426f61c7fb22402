"""Progress of a run's stages: bars in a terminal, or a line every 30 seconds in a file or pipe."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from sharmill.cli.command import describe_cost, describe_sum, describe_time, make_console, make_table, plain
from sharmill.engine.executor import Listener, StageResult
from sharmill.engine.progress import RankProgress
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Commit, Unit
from sharmill.engine.view import StageView, view_stage
from sharmill.errors import counted

_SECONDS_BETWEEN_VIEWS = 1.0


class ProgressListener(Listener):
    """Display of the engine's progress: a bar per stage in a terminal, plain lines otherwise.

    Args:
        console: console to print to; the command's console by default.
        names: names of all stages of the run, to number the current stage; empty if the work is not a run of stages.
        expected: expected seconds of stages by name; stages without a prediction are missing.
        seconds_between_lines: seconds between printed lines if ``console`` is not a terminal.
        clock: function that returns the seconds of a monotonic clock.
    """

    def __init__(
        self, console: Console | None = None, *, names: Sequence[str] = (), expected: Mapping[str, float] | None = None,
        seconds_between_lines: float | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._console = console = console or make_console()
        self._clock = clock
        # All rounds of a stage have the same name.
        self._names = list(dict.fromkeys(names))
        self._expected = expected or {}
        # For each stage so far, its view and a description of its time. Another thread draws this list, so each pair is
        # replaced as a whole.
        self._views: list[tuple[StageView, str]] = []
        self._began = self._next_view = self._last_printed = 0.0
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=4
        ) if console.is_terminal and not console.is_dumb_terminal else None  # fmt: skip
        # Continuous integration logs are read afterwards, so they get only a line at the start and end of a stage.
        between = math.inf if os.environ.get("CI") else 30.0
        self._seconds_between_lines = between if seconds_between_lines is None else seconds_between_lines

    def __enter__(self) -> "ProgressListener":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def stage_started(self, stage: StageRun, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        self._stage, self._units = stage, units
        self._commits = {commit.index: commit for commit in done}
        self._began = self._last_printed = self._clock()
        self._next_view = self._began + _SECONDS_BETWEEN_VIEWS
        view = view_stage(stage, units, self._commits, (), 0.0)
        self._cost_before = view.cost_done
        if self._views and self._views[-1][0].name == view.name:
            self._views.pop()
        self._views.append((view, self._describe_left(view, 0.0)))
        if len(done) < len(units):
            resumed = f", {len(done)} done before" if done else ""
            amount = describe_cost(view.cost, records=view.cost_unit == "records")
            self._print_line(f"{stage.name}{self._place()}: {counted(len(units), 'unit')}, {amount}{resumed}")
            if stage.resource == "gpu":
                self._print_line(f"{stage.name}: loading the model")

    def looked(self, ranks: Sequence[RankProgress]) -> None:
        now = self._clock()
        if now >= self._next_view:
            # The time of the latest heartbeat comes from the file system's clock, as do all other times in a view.
            newest = max((rank.written for rank in ranks), default=0.0)
            view = view_stage(self._stage, self._units, self._commits, ranks, newest)
            self._views[-1] = view, self._describe_left(view, now - self._began)
            # Computing a view of 100,000 units takes a quarter of a second, so spend at most 5 % of the time on views.
            self._next_view = now + max(_SECONDS_BETWEEN_VIEWS, 20 * (self._clock() - now))
        if now - self._last_printed >= self._seconds_between_lines:
            self._last_printed = now
            self._print_line(self._line(self._place(), self._describe_run_left()))

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        self._commits[unit.index] = commit

    def stage_ended(self, stage: StageRun, result: StageResult) -> None:
        took = self._clock() - self._began
        view = view_stage(stage, self._units, self._commits, (), 0.0, totals=result.totals)
        words = "failed"
        if result.totals is not None:
            words = "done before" if self._cost_before == view.cost else f"in {describe_time(took)}"
            view = replace(view, units_done=view.units, cost_done=view.cost)
        self._views[-1] = replace(view, rate=(view.cost_done - self._cost_before) / max(took, 1.0)), words
        if view.units:
            self._print_line(self._line())

    def _describe_left(self, view: StageView, elapsed: float) -> str:
        """Return, as text, the time left, or the elapsed time if that is unknown; "loading" or "starting" at first."""
        if view.seconds_left is not None:
            return f"{describe_time(view.seconds_left)} left"
        if view.cost_done <= self._cost_before and not any(rank.ready for rank in view.ranks):
            return "loading" if self._stage.resource == "gpu" else "starting"
        return f"for {describe_time(elapsed)}"

    def _place(self) -> str:
        """Return the number of the current stage and the number of stages, as text; "" if the stages were not named."""
        name = self._views[-1][0].name
        return f" (stage {self._names.index(name) + 1} of {len(self._names)})" if name in self._names else ""

    def _describe_run_left(self) -> str:
        """Return the time left for the whole run, as text; "" in the last stage, or if no time is known."""
        view = self._views[-1][0] if self._views else None
        later = self._names[self._names.index(view.name) + 1 :] if view is not None and view.name in self._names else []
        if view is None or not later:
            return ""
        left = 0.0 if view.state == "done" else view.seconds_left
        if left is None and view.name in self._expected:
            left = max(0.0, self._expected[view.name] - (self._clock() - self._began))
        return describe_sum("run", [left, *(self._expected.get(name) for name in later)])

    def render(self) -> Table:
        """Return a table of all stages so far that fits the width of the console."""
        # This many columns leave room for the rate and for long names.
        wide = self._console.width >= 110
        title = [self._place().strip(" ()") if self._views else "", self._describe_run_left()]
        table = make_table(", ".join(filter(None, title)) or None, expand=True)
        table.add_column("stage", no_wrap=True, max_width=24 if wide else 16)
        table.add_column("", ratio=1, min_width=8)
        for name in ("units", "processed", *(["rate"] if wide else []), "rejects"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("time", justify="right", no_wrap=True, min_width=12)
        for view, words in self._views:
            is_waiting = words in ("loading", "starting")
            bar = ProgressBar(total=view.cost or 1.0, completed=view.cost_done if view.cost else 1.0, pulse=is_waiting)
            cells = [
                f"{view.units_done}/{view.units}", describe_amount(view, wide=wide),
                *([describe_rate(view)] if wide else []), str(view.num_rejects),
            ]  # fmt: skip
            table.add_row(
                plain(view.name, style="bold"), bar, *map(plain, cells),
                plain(words, style="red" if words == "failed" else ""),
            )  # fmt: skip
        return table

    def _line(self, place: str = "", run_left: str = "") -> str:
        """Return the progress of the current stage as one line."""
        view, words = self._views[-1]
        parts = [
            f"{view.units_done}/{counted(view.units, 'unit')}", describe_amount(view), describe_rate(view),
            counted(view.num_rejects, "reject"), words, run_left,
        ]  # fmt: skip
        return f"{view.name}{place}: {', '.join(filter(None, parts))}"

    def _print_line(self, text: str) -> None:
        if self._live is None:
            self._console.print(plain(text), soft_wrap=True)


def describe_amount(view: StageView, *, wide: bool = True) -> str:
    """Return the finished and total amounts, as in ``0.27/0.54 h``; for records, only the total unless ``wide``."""
    records = view.cost_unit == "records"
    return describe_cost(*((view.cost_done, view.cost) if wide or not records else (view.cost,)), records=records)


def describe_rate(view: StageView) -> str:
    """Return the processing speed relative to real time, or an empty string for records."""
    return f"{view.rate:.0f}x real time" if view.rate and view.cost_unit != "records" else ""
