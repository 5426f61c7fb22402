"""The progress of a run, read from the files of its run directory only."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sharmill.cli.terminal import plain
from sharmill.config import load_config
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load
from sharmill.engine.progress import RankProgress, read_progress
from sharmill.engine.run import read_totals
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.worker import FailedAttempt
from sharmill.errors import ConfigError
from sharmill.executors.slurm.chain import ChainState, read_state
from sharmill.pipeline import make_stages

SILENT_SECONDS = 300.0
_MAX_FAILURES = 5


def print_status(console: Console, run_dir: Path) -> None:
    """Prints a row per stage, and one per rank of the stages that are under way.

    Raises:
        ConfigError: there is no run directory.
    """
    paths = RunDir(run_dir)
    if not paths.config.exists():
        raise ConfigError(f"{run_dir} is not a run directory: there is no {paths.config.name} in it")
    # By its own path: the stored one is relative to where the run was started, if it is relative.
    stages = make_stages(dataclasses.replace(load_config(paths.config), run_dir=str(run_dir)))
    chain = read_state(paths)
    statuses = [read_stage(stage, queued=chain is not None and chain.state == "waiting") for stage in stages]
    console.print(_table(str(run_dir), statuses))
    for status in statuses:
        for rank in status.ranks:
            console.print(_rank_line(status.name, rank))
    for status in statuses:
        if status.rejects:
            listed = ", ".join(f"{reason} {count}" for reason, count in Counter(status.rejects).most_common())
            console.print(plain(f"{status.name} rejects: {listed}"))
    for stage in stages:
        for line in _failure_lines(stage):
            console.print(line)
    if chain is not None:
        console.print(_chain_line(chain, paths))


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """What the files say of a stage.

    Costs are seconds of audio, or records for prepare. ``rate`` is how much of them all ranks do in a second. ``ranks``
    are those that have not ended; ``rejects`` counts by reason.
    """

    name: str
    state: str
    units: int = 0
    units_done: int = 0
    units_running: int = 0
    units_failed: int = 0
    cost: float = 0.0
    cost_done: float = 0.0
    rate: float = 0.0
    rejects: dict[str, int] = field(default_factory=dict)
    ranks: list[RankProgress] = field(default_factory=list)

    @property
    def units_left(self) -> int:
        return self.units - self.units_done - self.units_running - self.units_failed

    @property
    def seconds_left(self) -> float | None:
        """None where nothing tells how long it takes."""
        return (self.cost - self.cost_done) / self.rate if self.rate and self.state == "under way" else None


def read_stage(stage: Stage, *, queued: bool = False) -> StageStatus:
    """``queued`` says that a stage without ranks is one that waits for them."""
    if not stage.dir.units.exists():
        return StageStatus(name=stage.name, state="not begun")
    units = load(stage)
    commits = read_ledger(stage.dir.ledger, units)
    totals = read_totals(stage)
    rejects: Counter[str] = Counter()
    for commit in commits.values():
        rejects.update(commit.rejects)
    failed = {error.index for error in _failures(stage)} - set(commits)
    ranks = [] if totals else [rank for rank in read_progress(stage.dir.progress) if not rank.ended]
    alive = [rank for rank in ranks if not _is_silent(rank)]
    return StageStatus(
        name=stage.name,
        state=_state(totals is not None, ranks, bool(failed), queued),
        units=len(units),
        units_done=len(commits),
        units_running=len({rank.unit for rank in alive} - set(commits) - {None}),
        units_failed=len(failed),
        cost=sum(unit.cost for unit in units),
        cost_done=sum(unit.cost for unit in units if unit.index in commits),
        rate=sum(rank.audio_seconds / max(rank.updated - rank.started, 1.0) for rank in alive),
        rejects=totals.rejects if totals else dict(rejects),
        ranks=ranks,
    )


def _state(finished: bool, ranks: Sequence[RankProgress], failed: bool, queued: bool) -> str:
    if finished:
        return "done"
    if not all(map(_is_silent, ranks)):
        return "under way"
    if failed:
        return "failed"
    if ranks:
        return "silent"
    return "in the queue" if queued else "stopped"


def _table(title: str, statuses: Sequence[StageStatus]) -> Table:
    table = Table(title=plain(title), title_justify="left")
    columns = ("stage", "state", "units", "done", "running", "failed", "left", "hours done", "hours/hour", "time left",
               "rejects")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in ("stage", "state") else "right")
    for status in statuses:
        table.add_row(*(plain(cell) for cell in _cells(status)))
    return table


def _cells(status: StageStatus) -> list[str]:
    if status.state == "not begun":
        return [status.name, status.state]
    counts = (status.units, status.units_done, status.units_running, status.units_failed, status.units_left)
    has_audio = status.name != "prepare"
    return [
        status.name,
        status.state,
        *map(str, counts),
        f"{status.cost_done / 3600:.2f}/{status.cost / 3600:.2f}" if has_audio else "",
        f"{status.rate:.0f}" if status.rate and has_audio else "",
        "" if status.seconds_left is None else _describe_end(status.seconds_left),
        str(sum(status.rejects.values())),
    ]


def _describe_end(seconds: float) -> str:
    """The time left, and when that is over by this machine's clock."""
    end = datetime.now() + timedelta(seconds=seconds)
    return f"{seconds:.0f} s, until {end:{'%H:%M:%S' if seconds < 12 * 3600 else '%Y-%m-%d %H:%M'}}"


def _is_silent(rank: RankProgress) -> bool:
    return time.time() - rank.updated > SILENT_SECONDS


def _failures(stage: Stage) -> list[FailedAttempt]:
    """The units that failed for good when the stage ended last."""
    if not stage.dir.failures.exists():
        return []
    return [msgspec.json.decode(line, type=FailedAttempt) for line in stage.dir.failures.read_bytes().splitlines()]


def _failure_lines(stage: Stage) -> Iterator[Text]:
    """A line for each of the first units that failed, and where their tracebacks are."""
    failures = _failures(stage)
    for error in failures[:_MAX_FAILURES]:
        yield plain(f"{stage.name} unit {error.index} failed: {error.message}", style="red")
    if failures:
        yield plain(f"{stage.name}: {len(failures)} units failed; tracebacks: {stage.dir.failures}", style="red")


def _chain_line(state: ChainState, run_dir: RunDir) -> Text:
    """How far the chain of a cluster has got."""
    since = datetime.fromtimestamp(run_dir.chain.stat().st_mtime)
    line = f"chain of jobs: {state.state} since {since:%Y-%m-%d %H:%M:%S}: {state.message}"
    return plain(line, style="red" if state.state == "failed" else "")


def _rank_line(stage: str, rank: RankProgress) -> Text:
    silent = time.time() - rank.updated
    idle = "between units" if rank.units_done else "loading"
    unit = idle if rank.unit is None else f"unit {rank.unit}"
    line = (
        f"{stage} rank {rank.rank} on {rank.host} (pid {rank.pid}): {unit}, {rank.units_done} done, "
        f"{rank.peak_memory_mb:.0f} MB, last sign of life {silent:.0f} s ago"
    )
    if not _is_silent(rank):
        return plain(line)
    return plain(f"{line}: SILENT", style="red")
