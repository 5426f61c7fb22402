"""``sharmill merge``: one dataset of several."""

from __future__ import annotations

import click

from sharmill.cli.console import json_option, make_console, plain, print_json
from sharmill.cli.exit_status import OK


@click.command()
@click.argument("datasets", nargs=-1, required=True, metavar="DATASET... OUT", type=click.Path(path_type=str))
@click.option("--copy", is_flag=True, help="Copy the files; by default they are hard links where possible.")
@click.option("--name", help="The name of the new dataset (default: that of its folder).")
@json_option
def merge(datasets: tuple[str, ...], copy: bool, name: str | None, as_json: bool) -> int:
    """Make one dataset of several.

    OUT is a new dataset directory with the shards of all DATASETs, in order. These stay as they are.
    """
    from sharmill.errors import ConfigError
    from sharmill.grow.merge import merge_datasets

    *sources, out = datasets
    if len(sources) < 2:
        raise ConfigError("'merge' takes two datasets or more, and then the new directory", code="bad_usage")
    merged = merge_datasets(sources, out, copy=copy, name=name)
    record, placed = merged.record, merged.placed
    line = (
        f"{out}: {record.num_shards} shards, {record.num_cuts} cuts, {record.target_seconds / 3600:.3f} h; "
        f"{placed.linked} files linked, {placed.copied} copied"
    )
    make_console().print(plain(line), soft_wrap=True)
    if as_json:
        print_json({"dataset": record, "files": placed})
    return OK
