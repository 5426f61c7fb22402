"""``sharmill inspect``: a dataset, a shard or a cut."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sharmill.cli.console import json_option, make_console, make_pairs, make_table, plain, print_json
from sharmill.cli.exit_status import OK
from sharmill.errors import ConfigError
from sharmill.executors.logs import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from sharmill.inspect.stored import StoredCut
    from sharmill.shar.index import ShardRecord

# Of a table of cuts; see ``shard_rows``.
_COLUMNS = ("cut", "s", "context s", "similarity", "speaker", "text")
_MAX_CELL = 80


@click.command()
@click.argument("dataset", type=click.Path(path_type=Path))
@click.argument("cut_id", required=False)
@click.option("--shard", "shard_index", type=click.IntRange(min=0), metavar="N", help="Show the table of a shard.")
@click.option("--export", "folder", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Write the cut, its audio and its codes to this folder.")  # fmt: skip
@json_option
def inspect(dataset: Path, cut_id: str | None, shard_index: int | None, folder: Path | None, as_json: bool) -> int:
    """Look at a dataset, a shard or a cut.

    A cut is shown in full, with the shapes of its fields and a line of waveform; a shard is shown as a table.
    """
    from sharmill.inspect.describe import dataset_rows, describe_as_values
    from sharmill.inspect.export import export_cut
    from sharmill.inspect.stored import find_cut, find_shard, read_shard
    from sharmill.shar.index import read_dataset

    if cut_id is not None and shard_index is not None:
        raise ConfigError("give the id of a cut or --shard, not both", code="bad_usage")
    if folder is not None and cut_id is None:
        raise ConfigError("--export writes a cut: give its id", code="bad_usage")
    console = make_console()
    if shard_index is not None:
        shard = find_shard(dataset, shard_index)
        if as_json:
            print_json({"shard": shard, "cuts": list(read_shard(dataset, shard))})
        _show_shard(console, dataset, shard)
    elif cut_id is None:
        record = read_dataset(dataset)
        if as_json:
            print_json(record)
        _print_pairs(console, dataset_rows(dataset, record))
        console.print(plain(f"sharmill inspect {dataset} --shard 0 lists the cuts of a shard", style="dim"))
    else:
        stored = find_cut(dataset, cut_id)
        files = [] if folder is None else export_cut(stored, folder)
        if as_json:
            print_json(describe_as_values(stored, files))
        _show_cut(console, stored, files)
    return OK


def _show_shard(console: Console, directory: Path, shard: ShardRecord) -> None:
    from sharmill.inspect.describe import shard_rows
    from sharmill.inspect.stored import read_shard

    table = make_table(f"shard {shard.index}: {shard.count} cuts, {shard.target_seconds:.1f} s of target audio")
    rows = [[one_line(cell) for cell in row] for row in shard_rows(read_shard(directory, shard))]
    for name, *cells in zip(_COLUMNS, *rows, strict=True):
        if any(cells):  # datasets without contexts have nothing in some columns
            # Ids and numbers stay whole, since they are what one looks up; speakers and texts get what is left.
            table.add_column(name, no_wrap=name not in ("speaker", "text"), overflow="fold")
    shown = [column for column in range(len(_COLUMNS)) if any(row[column] for row in rows)]
    for row in rows:
        table.add_row(*[plain(row[column][:_MAX_CELL]) for column in shown])
    console.print(table)
    for field, file in shard.fields.items():
        console.print(plain(f"{field}: {file.file}, {file.size:,} bytes"), soft_wrap=True)


def _show_cut(console: Console, stored: StoredCut, files: list[Path]) -> None:
    from sharmill.inspect.describe import cut_rows, field_rows

    console.print(plain(f"cut {stored.number} of shard {stored.shard}", style="bold"))
    _print_pairs(console, cut_rows(stored.cut))
    for field, shape, picture in field_rows(stored):
        console.print(plain(f"{field}: {shape}", style="bold"), soft_wrap=True)
        console.print(plain(f"  {picture}"), soft_wrap=True)
    for file in files:
        console.print(plain(f"wrote {file}"), soft_wrap=True)


def _print_pairs(console: Console, pairs: Iterable[tuple[str, str]]) -> None:
    table = make_pairs()
    for name, value in pairs:
        table.add_row(plain(name), plain(value))
    console.print(table)
