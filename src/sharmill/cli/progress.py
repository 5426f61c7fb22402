"""Progress of the stages of a run: bars in a terminal, or a line every 30 seconds into a file or a pipe."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from sharmill.cli.console import describe_cost, describe_time, make_table, plain
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit

SECONDS_BETWEEN_LINES = 30.0
_REFRESHES_PER_SECOND = 4
# From this many columns on there is room for the rate and for long names.
_WIDE = 110


@dataclass
class StageProgress:
    """The state of one stage: units, costs and rejects so far, and the times by the clock of the listener.

    Costs are seconds of audio, contexts included, or records for prepare: ``total`` of all units, ``committed`` of
    those that are done, ``already_done`` of those that an earlier run did, and ``under_way`` what is done of the other
    units, by their index. ``ready`` is when the first rank had loaded its model.
    """

    name: str
    counts_records: bool
    loads_model: bool
    total: float
    num_units: int
    started: float
    committed: float = 0.0
    units_done: int = 0
    rejects: int = 0
    already_done: float = 0.0
    under_way: dict[int, float] = field(default_factory=dict)
    num_loading: int = 0
    ready: float | None = None
    ended: float | None = None
    failed: bool = False
    all_done_before: bool = False

    @property
    def done(self) -> float:
        """The cost of all that is done, units under way included."""
        return min(self.committed + sum(self.under_way.values()), self.total)

    def elapsed(self, now: float) -> float:
        """Return the seconds from the start of the stage to its end, or to ``now``."""
        return (now if self.ended is None else self.ended) - self.started

    def rate(self, now: float) -> float | None:
        """Return the cost per second since the first model was loaded, or None before anything is done."""
        since = self.started if self.ready is None else self.ready
        seconds = (now if self.ended is None else self.ended) - since
        advanced = self.done - self.already_done
        return advanced / seconds if advanced > 0 and seconds > 1 else None

    def seconds_left(self, now: float) -> float | None:
        """Return the predicted time to the end, or None before anything is done."""
        rate = self.rate(now)
        return None if rate is None else max(self.total - self.done, 0.0) / rate

    def describe_amount(self, *, wide: bool = True) -> str:
        """Return what is done and what there is in all, as in ``0.27/0.54 h``; of records only all unless ``wide``."""
        costs = (self.done, self.total) if wide or not self.counts_records else (self.total,)
        return describe_cost(*costs, records=self.counts_records)

    def describe_rate(self, now: float) -> str:
        """Return how much faster than real time audio is processed, or an empty string."""
        rate = None if self.counts_records else self.rate(now)
        return "" if rate is None else f"{rate:.0f} x real time"

    def describe_left(self, now: float) -> str:
        """Return the time left; before it is known, the time so far; at the end, the time that the stage took."""
        if self.ended is not None and self.all_done_before:
            return "done before"
        if self.ended is not None:
            return "failed" if self.failed else f"in {describe_time(self.elapsed(now))}"
        if self.is_loading():
            return "loading" if self.loads_model else "starting"
        left = self.seconds_left(now)
        return f"for {describe_time(self.elapsed(now))}" if left is None else f"{describe_time(left)} left"

    def is_loading(self) -> bool:
        """Return True while all ranks that there are start, or load their model."""
        return self.num_loading > 0 and self.ready is None and self.done <= self.already_done


class ProgressListener(Listener):
    """A display of what the engine reports: a bar per stage in a terminal, plain lines elsewhere.

    Args:
        console: where to print.
        names: of the stages of the whole run, to say which one is at work; none for work that is no run of stages.
        expected: seconds that stages are expected to take, by their names, as far as that is known.
        seconds_between_lines: how often a line is printed where ``console`` is no terminal.
        clock: seconds on a clock that never goes back.
    """

    def __init__(
        self, console: Console, *, names: Sequence[str] = (), expected: Mapping[str, float] | None = None,
        seconds_between_lines: float | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._console = console
        self._clock = clock
        self._names = names
        self._expected = expected or {}
        self._stages: list[StageProgress] = []
        self._lock = threading.RLock()
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=_REFRESHES_PER_SECOND
        ) if console.is_terminal and not console.is_dumb_terminal else None  # fmt: skip
        # Logs of continuous integration are read afterwards: one line for the beginning of a stage, one for its end.
        between = threading.TIMEOUT_MAX if os.environ.get("CI") else SECONDS_BETWEEN_LINES
        self._seconds_between_lines = between if seconds_between_lines is None else seconds_between_lines
        self._closed = threading.Event()
        self._printer = threading.Thread(target=self._keep_printing, name="progress-lines", daemon=True)

    def __enter__(self) -> ProgressListener:
        if self._live is not None:
            self._live.start()
        else:
            self._printer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        else:
            self._closed.set()
            self._printer.join()

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        costs = {unit.index: unit.cost for unit in units}
        already_done = sum(costs[commit.index] for commit in done)
        progress = StageProgress(
            name=stage.name,
            counts_records=stage.cost_unit == "records",
            loads_model=stage.resource == "gpu",
            total=sum(costs.values()),
            num_units=len(units),
            started=self._clock(),
            committed=already_done,
            units_done=len(done),
            rejects=sum(commit.num_rejected for commit in done),
            already_done=already_done,
            all_done_before=len(done) == len(units),
        )
        with self._lock:
            self._stages.append(progress)
        if self._live is None and not progress.all_done_before:
            amount = describe_cost(progress.total, records=progress.counts_records)
            resumed = f", {len(done)} done before" if done else ""
            self._print(f"{progress.name}{self._place()}: {_count(len(units), 'unit')}, {amount}{resumed}")

    def loading(self, num_ranks: int) -> None:
        with self._lock:
            current = self._stages[-1]
            begins = current.loads_model and not current.num_loading and current.ready is None
            if num_ranks < current.num_loading and current.ready is None:
                current.ready = self._clock()
            current.num_loading = num_ranks
        if self._live is None and begins and num_ranks:
            self._print(f"{current.name}: loading the model")

    def unit_advanced(self, unit: Unit, done: float) -> None:
        with self._lock:
            self._stages[-1].under_way[unit.index] = done

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        with self._lock:
            current = self._stages[-1]
            current.units_done += 1
            current.rejects += commit.num_rejected
            current.under_way.pop(unit.index, None)
            current.committed += unit.cost

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        with self._lock:
            current = self._stages[-1]
            current.ended = self._clock()
            current.failed = result.totals is None
            if result.totals is not None:
                current.rejects = result.totals.num_rejected
                current.committed = current.total
        if self._live is None:
            self._print(self._line())

    def _place(self) -> str:
        """Return which stage of how many is at work, or an empty string."""
        return f" (stage {len(self._stages)} of {len(self._names)})" if self._names else ""

    def _describe_run_left(self, now: float) -> str:
        """Return the time left of the whole run, or an empty string in its last stage, and where nothing is known."""
        if not self._stages or not (later := self._names[len(self._stages) :]):
            return ""
        stage = self._stages[-1]
        left = 0.0 if stage.ended is not None else stage.seconds_left(now)
        if left is None and stage.name in self._expected:
            left = max(0.0, self._expected[stage.name] - stage.elapsed(now))
        parts = [left, *(self._expected.get(name) for name in later)]
        known = [part for part in parts if part is not None]
        # Of stages that have never run, nor in a pilot, nothing is known.
        if len(known) == len(parts):
            return f"run: {describe_time(sum(known))} left"
        return f"run: at least {describe_time(sum(known))} left" if sum(known) >= 1 else ""

    def render(self) -> Table:
        """Return the table of all stages so far, for the width of the console."""
        wide = self._console.width >= _WIDE
        with self._lock:
            title = [self._place().strip(" ()"), self._describe_run_left(self._clock())]
        table = make_table(", ".join(filter(None, title)) or None, expand=True)
        table.add_column("stage", no_wrap=True, max_width=24 if wide else 16)
        table.add_column("", ratio=1, min_width=8)
        table.add_column("units", justify="right", no_wrap=True)
        table.add_column("processed", justify="right", no_wrap=True)
        if wide:
            table.add_column("rate", justify="right", no_wrap=True)
        table.add_column("rejects", justify="right", no_wrap=True)
        table.add_column("time", justify="right", no_wrap=True, min_width=12)
        with self._lock:
            now = self._clock()
            for stage in self._stages:
                bar = ProgressBar(total=stage.total or 1.0, completed=stage.done if stage.total else 1.0,
                                  pulse=stage.is_loading(), animation_time=now)  # fmt: skip
                rate = [plain(stage.describe_rate(now))] if wide else []
                table.add_row(
                    plain(stage.name, style="bold"), bar, plain(f"{stage.units_done}/{stage.num_units}"),
                    plain(stage.describe_amount(wide=wide)), *rate, plain(str(stage.rejects)),
                    plain(stage.describe_left(now), style="red" if stage.failed else ""),
                )  # fmt: skip
        return table

    def _line(self) -> str:
        """Return the state of the current stage as one line."""
        with self._lock:
            now = self._clock()
            stage = self._stages[-1]
            parts = [
                f"{stage.units_done}/{_count(stage.num_units, 'unit')}", stage.describe_amount(),
                stage.describe_rate(now), _count(stage.rejects, "reject"), stage.describe_left(now),
                self._describe_run_left(now) if stage.ended is None else "",
            ]  # fmt: skip
            place = self._place() if stage.ended is None else ""
        return f"{stage.name}{place}: {', '.join(part for part in parts if part)}"

    def _keep_printing(self) -> None:
        while not self._closed.wait(self._seconds_between_lines):
            with self._lock:
                under_way = bool(self._stages) and self._stages[-1].ended is None
            if under_way:
                self._print(self._line())

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(plain(text, style=style), soft_wrap=self._live is None)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
