"""``sharmill plan``: units, hours, balance and disk of a run, without running it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from sharmill.cli.arguments import split_arguments
from sharmill.cli.console import make_console, make_table, plain
from sharmill.cli.exit_status import OK
from sharmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from sharmill.config import Config
    from sharmill.engine.stage import Stage

# Speech as FLAC at 16 to 24 kHz takes 15 to 35 kB a second; codes add little. A round figure on the safe side.
_BYTES_PER_SECOND = 40_000


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG... [KEY=VALUE...]")
@click.option("--ranks", type=click.IntRange(1), help="Show the balance over this many ranks (default: the cores).")
def plan(arguments: tuple[str, ...], ranks: int | None) -> int:
    """Show what would run, and run nothing.

    That is units, hours, cost per rank, balance and the disk needed, of each stage whose input is there already.
    """
    from sharmill.config import load_config

    paths, overrides, names = split_arguments(arguments)
    if names:
        raise ConfigError(f"'plan' takes no stage names: {', '.join(names)}")
    console = make_console()
    for path in paths:
        print_plan(console, load_config(path, overrides), ranks)
    return OK


def print_plan(console: Console, config: Config, ranks: int | None) -> None:
    """Print a row per stage that can be planned now; the others depend on what comes before them."""
    from sharmill.pipeline import check_config, make_stages

    check_config(config, stages=())
    count = ranks or len(os.sched_getaffinity(0))
    table = make_table(config.name)
    for column in ("stage", "units", "done", "left", f"largest of {count} ranks", "balance", "disk"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in make_stages(config):
        table.add_row(*(plain(cell) for cell in _row(stage, count)))
    console.print(table)


def _row(stage: Stage, ranks: int) -> tuple[str, ...]:
    from sharmill.cli.stage_status import read_or_preview_units
    from sharmill.engine.balance import pack
    from sharmill.write.stage import WriteStage

    try:
        units, done = read_or_preview_units(stage)
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
    return f"{cost:.0f} records" if stage.cost_unit == "records" else f"{cost / 3600:.2f} h"
