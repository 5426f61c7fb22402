"""``sharmill sidecars``: index files for lhotse 2."""

from __future__ import annotations

import click

from sharmill.cli.exit_status import OK


@click.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.option("--into", type=click.Path(path_type=str), metavar="DIR", help="Where to write (default: into DATASET).")
def sidecars(dataset: str, into: str | None) -> int:
    """Write the index files of lhotse 2 for a dataset.

    With them lhotse takes any cut by its number; sharmill's own reader needs none.
    """
    from sharmill.shar.sidecars import write_sidecars

    write_sidecars(dataset, into)
    return OK
