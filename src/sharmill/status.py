"""The progress of a run, read from the files of its run directory only."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sharmill.chain import read_state
from sharmill.config import load_config
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load
from sharmill.engine.progress import RankProgress, read_progress
from sharmill.engine.run import read_totals
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.worker import UnitError
from sharmill.errors import ConfigError
from sharmill.pipeline import make_stages
from sharmill.terminal import plain

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
    table = Table(title=plain(str(run_dir)), title_justify="left")
    for column in ("stage", "state", "units done", "hours done", "x real time", "left", "rejects"):
        table.add_column(column, justify="left" if column in ("stage", "state") else "right")
    ranks: list[tuple[Stage, RankProgress]] = []
    # By its own path: the stored one is relative to where the run was started, if it is relative.
    stages = make_stages(dataclasses.replace(load_config(paths.config), run_dir=str(run_dir)))
    for stage in stages:
        table.add_row(*(plain(cell) for cell in _stage_row(stage, ranks)))
    console.print(table)
    for stage, rank in ranks:
        console.print(_rank_line(stage, rank))
    for stage in stages:
        for line in _failure_lines(stage):
            console.print(line)
    _print_chain(console, paths)


def _stage_row(stage: Stage, ranks: list[tuple[Stage, RankProgress]]) -> tuple[str, ...]:
    if not stage.dir.units.exists():
        return stage.name, "not begun", "", "", "", "", ""
    units = load(stage)
    commits = read_ledger(stage.dir.ledger, units)
    done = sum(unit.cost for unit in units if unit.index in commits)
    total = sum(unit.cost for unit in units)
    totals = read_totals(stage)
    rejects = totals.num_rejected if totals else sum(commit.num_rejected for commit in commits.values())
    begun = [rank for rank in read_progress(stage.dir.progress) if not rank.ended]
    finished = totals is not None
    if not finished:
        ranks += [(stage, rank) for rank in begun]
    alive = [rank for rank in begun if not _is_silent(rank)]
    rate = sum(rank.audio_seconds / max(rank.updated - rank.started, 1.0) for rank in alive)
    left = _left((total - done) / rate) if rate and not finished else ""
    hours = "" if stage.name == "prepare" else f"{done / 3600:.2f}/{total / 3600:.2f}"
    state = "done" if finished else "failed" if stage.dir.failures.exists() else "under way" if alive else "stopped"
    return (
        stage.name,
        state,
        f"{len(commits)}/{len(units)}",
        hours,
        f"{rate:.0f}" if rate else "",
        left,
        str(rejects),
    )


def _left(seconds: float) -> str:
    """The time left, and when that is over by this machine's clock."""
    end = datetime.now() + timedelta(seconds=seconds)
    return f"{seconds:.0f} s, until {end:{'%H:%M:%S' if seconds < 12 * 3600 else '%Y-%m-%d %H:%M'}}"


def _is_silent(rank: RankProgress) -> bool:
    return time.time() - rank.updated > SILENT_SECONDS


def _failure_lines(stage: Stage) -> Iterator[Text]:
    """A line for each of the first units that failed for good, and where their tracebacks are."""
    if not stage.dir.failures.exists():
        return
    lines = stage.dir.failures.read_bytes().splitlines()
    for line in lines[:_MAX_FAILURES]:
        error = msgspec.json.decode(line, type=UnitError)
        yield plain(f"{stage.name} unit {error.index} failed: {error.message}", style="red")
    yield plain(f"{stage.name}: {len(lines)} units failed; tracebacks: {stage.dir.failures}", style="red")


def _print_chain(console: Console, run_dir: RunDir) -> None:
    """How far the chain of a cluster has got, where there is one."""
    if not run_dir.chain.exists():
        return
    state = read_state(run_dir)
    if state is not None:
        since = datetime.fromtimestamp(run_dir.chain.stat().st_mtime)
        line = f"chain of jobs: {state.state} since {since:%Y-%m-%d %H:%M:%S}: {state.message}"
        console.print(plain(line, style="red" if state.state == "failed" else ""))


def _rank_line(stage: Stage, rank: RankProgress) -> Text:
    silent = time.time() - rank.updated
    unit = "between units" if rank.unit is None else f"unit {rank.unit}"
    line = (
        f"{stage.name} rank {rank.rank} on {rank.host} (pid {rank.pid}): {unit}, {rank.units_done} done, "
        f"{rank.peak_memory_mb:.0f} MB, last sign of life {silent:.0f} s ago"
    )
    if not _is_silent(rank):
        return plain(line)
    return plain(f"{line}: SILENT", style="red")
