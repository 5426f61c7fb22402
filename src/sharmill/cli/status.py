"""``sharmill status``: the progress of a run."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sharmill.cli.console import make_console, make_table, plain
from sharmill.cli.exit_status import OK
from sharmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sharmill.cli.stage_status import StageStatus
    from sharmill.engine.progress import RankProgress
    from sharmill.engine.rundir import RunDir
    from sharmill.engine.stage import Stage
    from sharmill.executors.slurm.chain import ChainState

_MAX_FAILURES = 5


@click.command()
@click.argument("run_dir", type=click.Path(path_type=str))
@click.option("--watch", is_flag=True, help="Go on showing it, every two seconds, until Ctrl-C.")
def status(run_dir: str, watch: bool) -> int:
    """Show the progress of every stage and rank of a run directory."""
    console = make_console()
    print_status(console, Path(run_dir))
    with suppress(KeyboardInterrupt):
        while watch:
            time.sleep(2)
            console.clear()
            print_status(console, Path(run_dir))
    return OK


def print_status(console: Console, run_dir: Path) -> None:
    """Print a row per stage, and one per rank of the stages that are under way.

    Raises:
        ConfigError: there is no run directory.
    """
    from sharmill.cli.stage_status import read_stage
    from sharmill.config import load_config
    from sharmill.engine.rundir import RunDir
    from sharmill.executors.slurm.chain import read_state
    from sharmill.pipeline import make_stages

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


def _table(title: str, statuses: Sequence[StageStatus]) -> Table:
    table = make_table(title)
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
    has_audio = status.cost_unit == "seconds of audio"
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
    """Return the time left, and the time of day at its end by this machine's clock."""
    end = datetime.now() + timedelta(seconds=seconds)
    return f"{seconds:.0f} s, until {end:{'%H:%M:%S' if seconds < 12 * 3600 else '%Y-%m-%d %H:%M'}}"


def _failure_lines(stage: Stage) -> Iterator[Text]:
    """Yield a line for each of the first units that failed, and one that names the file of their tracebacks."""
    from sharmill.cli.stage_status import read_failures

    failures = read_failures(stage)
    for error in failures[:_MAX_FAILURES]:
        yield plain(f"{stage.name} unit {error.index} failed: {error.message}", style="red")
    if failures:
        yield plain(f"{stage.name}: {len(failures)} units failed; tracebacks: {stage.dir.failures}", style="red")


def _chain_line(state: ChainState, run_dir: RunDir) -> Text:
    """Return the state of the chain of jobs on a cluster."""
    since = datetime.fromtimestamp(run_dir.chain.stat().st_mtime)
    line = f"chain of jobs: {state.state} since {since:%Y-%m-%d %H:%M:%S}: {state.message}"
    return plain(line, style="red" if state.state == "failed" else "")


def _rank_line(stage: str, rank: RankProgress) -> Text:
    from sharmill.cli.stage_status import is_silent

    silent = time.time() - rank.updated
    idle = "between units" if rank.units_done else "loading"
    unit = idle if rank.unit is None else f"unit {rank.unit}"
    line = (
        f"{stage} rank {rank.rank} on {rank.host} (pid {rank.pid}): {unit}, {rank.units_done} done, "
        f"{rank.peak_memory_mb:.0f} MB, last sign of life {silent:.0f} s ago"
    )
    if not is_silent(rank):
        return plain(line)
    return plain(f"{line}: SILENT", style="red")
