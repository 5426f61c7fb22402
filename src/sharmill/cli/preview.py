"""What a run would do: units, hours, balance and disk, without doing it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sharmill.cli.terminal import plain
from sharmill.config import Config
from sharmill.engine.balance import pack
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import ConfigError
from sharmill.pipeline import check_config, make_stages
from sharmill.write.stage import WriteStage

# Speech as FLAC at 16 to 24 kHz takes 15 to 35 kB a second; codes add little. A round figure on the safe side.
_BYTES_PER_SECOND = 40_000


def print_plan(console: Console, config: Config, ranks: int | None) -> None:
    """Prints a row per stage that can be planned now; the others depend on what comes before them."""
    check_config(config, stages=())
    count = ranks or len(os.sched_getaffinity(0))
    table = Table(title=plain(config.name), title_justify="left")
    for column in ("stage", "units", "done", "left", f"largest of {count} ranks", "balance", "disk"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in make_stages(config):
        table.add_row(*(plain(cell) for cell in _row(stage, count)))
    console.print(table)


def _row(stage: Stage, ranks: int) -> tuple[str, ...]:
    try:
        units, done = plan_or_load(stage)
    except ConfigError as error:
        return stage.name, str(error), "", "", "", "", ""
    left = [unit.cost for unit in units if unit.index not in done]
    loads = [sum(left[item] for item in items) for items in pack(left, ranks)]
    largest, mean = max(loads), sum(loads) / ranks
    balance = f"{mean / largest:.0%}" if largest else ""
    disk = f"{sum(left) * _BYTES_PER_SECOND / 1e9:.1f} GB" if left and isinstance(stage, WriteStage) else ""
    return (
        stage.name,
        str(len(units)),
        str(len(done)),
        _amount(stage, sum(left)),
        _amount(stage, largest),
        balance,
        disk,
    )


def _amount(stage: Stage, cost: float) -> str:
    return f"{cost:.0f} records" if stage.name == "prepare" else f"{cost / 3600:.2f} h"


def plan_or_load(stage: Stage) -> tuple[list[Unit], dict[int, Commit]]:
    """The units of a stage and the commits of those that are done. Without a frozen plan they are planned aside.

    Raises:
        ConfigError: it cannot be planned, as long as the stage before it is not finished.
    """
    stage.identity()
    if stage.dir.units.exists():
        units = load(stage)
        return units, read_ledger(stage.dir.ledger, units)
    with tempfile.TemporaryDirectory(prefix="sharmill-plan-") as folder:
        return list(stage.plan(Path(folder))), {}
