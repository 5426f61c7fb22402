"""The progress of a run, read from the files of its run directory only."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sharmill.config import load_config
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load
from sharmill.engine.progress import RankProgress, read_progress
from sharmill.engine.run import read_totals
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.errors import ConfigError
from sharmill.pipeline import make_stages

SILENT_SECONDS = 300.0


def print_status(console: Console, run_dir: Path) -> None:
    """Prints a row per stage, and one per rank of the stages that are under way.

    Raises:
        ConfigError: there is no run directory.
    """
    paths = RunDir(run_dir)
    if not paths.config.exists():
        raise ConfigError(f"{run_dir} is not a run directory: there is no {paths.config.name} in it")
    table = Table(title=Text(str(run_dir)), title_justify="left")
    for column in ("stage", "state", "units done", "hours done", "x real time", "left", "rejects"):
        table.add_column(column, justify="left" if column in ("stage", "state") else "right")
    ranks: list[tuple[Stage, RankProgress]] = []
    for stage in make_stages(load_config(paths.config)):
        table.add_row(*(Text(cell) for cell in _stage_row(stage, ranks)))
    console.print(table)
    for stage, rank in ranks:
        console.print(_rank_line(stage, rank))


def _stage_row(stage: Stage, ranks: list[tuple[Stage, RankProgress]]) -> tuple[str, ...]:
    if not stage.dir.units.exists():
        return stage.name, "not begun", "", "", "", "", ""
    units = load(stage)
    commits = read_ledger(stage.dir.ledger, units)
    done = sum(unit.cost for unit in units if unit.index in commits)
    total = sum(unit.cost for unit in units)
    totals = read_totals(stage)
    rejects = totals.num_rejected if totals else sum(commit.num_rejected for commit in commits.values())
    alive = [rank for rank in read_progress(stage.dir.progress) if not rank.ended]
    finished = totals is not None
    if not finished:
        ranks += [(stage, rank) for rank in alive]
    rate = sum(rank.audio_seconds / max(rank.updated - rank.started, 1.0) for rank in alive)
    left = f"{(total - done) / rate:.0f} s" if rate and not finished else ""
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


def _rank_line(stage: Stage, rank: RankProgress) -> Text:
    silent = time.time() - rank.updated
    unit = "between units" if rank.unit is None else f"unit {rank.unit}"
    line = (
        f"{stage.name} rank {rank.rank} on {rank.host} (pid {rank.pid}): {unit}, {rank.units_done} done, "
        f"{rank.peak_memory_mb:.0f} MB, last sign of life {silent:.0f} s ago"
    )
    return Text(line, style="red" if silent > SILENT_SECONDS else "")
