"""The table of ``sharmill plan`` that predicts time, cost and disk of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sharmill.cli.console import describe_time, make_table, plain

if TYPE_CHECKING:
    from rich.console import Console

    from sharmill.pilot.predict import StagePrediction


def print_prediction(
    console: Console, predictions: Sequence[StagePrediction], source: str, gpu_hour: float | None
) -> None:
    """Print a row for each stage and one for all of them.

    Args:
        source: where the rates are from.
        gpu_hour: the price of an hour of a GPU, or None.
    """
    names = ["stage", "ranks", "time", "GPU h", "core h", "disk"]
    names += ["price"] if gpu_hour is not None else []
    table = make_table("predicted, for what is left", names, no_wrap=True)
    rows = [(one.name if one.is_planned else f"{one.name} *", str(one.ranks), [one]) for one in predictions]
    for name, ranks, of_row in [*rows, ("all", "", list(predictions))]:
        gpu = sum(one.rank_seconds for one in of_row if one.on_gpu) / 3600
        core = sum(one.rank_seconds for one in of_row if not one.on_gpu) / 3600
        cells = [
            name, ranks, describe_time(sum(one.wall_seconds for one in of_row)), describe_hours(gpu),
            describe_hours(core), describe_bytes(sum(one.num_bytes for one in of_row)),
        ]  # fmt: skip
        cells += [f"{gpu * gpu_hour:,.2f}"] if gpu_hour is not None else []
        table.add_row(*(plain(cell, style="bold" if name == "all" else "") for cell in cells))
    console.print(table)
    console.print(plain(f"rates: {source}", style="dim"))
    if any(one.on_gpu for one in predictions):
        console.print(plain("GPU h: of ranks; several that share a GPU count as if each had its own", style="dim"))
    console.print(plain("beside these times: the start of the command, and the page of the run", style="dim"))
    if any(not one.is_planned for one in predictions):
        console.print(plain("*: cannot be planned yet; in proportion to the records of the input", style="dim"))


def describe_hours(hours: float) -> str:
    """Return hours of ranks, or nothing where there are none.

    >>> describe_hours(1234.5), describe_hours(0.25), describe_hours(0)
    ('1,234', '0.250', '')
    """
    return f"{hours:,.{0 if hours >= 1000 else 1 if hours >= 10 else 3}f}" if hours else ""


def describe_bytes(size: float) -> str:
    """Return a size on disk.

    >>> describe_bytes(2_500_000), describe_bytes(3e12)
    ('2.5 MB', '3.0 TB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
