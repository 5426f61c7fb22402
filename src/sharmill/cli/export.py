"""``sharmill export``: a dataset as other files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from sharmill.cli.console import json_option, make_console, plain, print_json
from sharmill.cli.exit_status import OK


@click.command()
@click.argument("dataset", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--to", "form", required=True, metavar="FORM",
              help="nemo_codes: a NeMo manifest with a file of codes per utterance.")  # fmt: skip
@click.option("--codec", help="Whose codes, where there are several.")
@json_option
def export(dataset: Path, out: Path, form: str, codec: str | None, as_json: bool) -> int:
    """Write a dataset as files for trainers that do not read Shar."""
    from sharmill.export.run import export_dataset

    console = make_console()
    with console.status("export") as status:
        exported = export_dataset(
            dataset, form, out, codec=codec,
            progress=lambda done, total: status.update(f"export: shard {done:,} of {total:,}"),
        )  # fmt: skip
    hours = exported.seconds / 3600
    console.print(plain(f"wrote {exported.manifest}: {exported.num_cuts:,} cuts, {hours:,.2f} hours"), soft_wrap=True)
    if as_json:
        print_json({**asdict(exported), "manifest": str(exported.manifest)})
    return OK
