"""``sharmill doctor``: the state of this machine, or advice about the settings of a training."""

from __future__ import annotations

from pathlib import Path

import click

from sharmill.cli.console import json_option, make_console, make_pairs, plain, print_json, print_lines
from sharmill.cli.exit_status import FINDINGS, OK


@click.command()
@click.argument("settings", metavar="[TRAIN.yaml]", required=False, type=click.Path(path_type=str))
@click.option("--folder", default=".", show_default=True, type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Where datasets are to be made: its file system is tried.")  # fmt: skip
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Data-parallel ranks.")
@click.option("--batches", "num_batches", type=click.IntRange(1), default=100, show_default=True,
              help="Batches of the first rank to look at.")  # fmt: skip
@click.option("--tokenizer", help="As for sharmill bins; where the settings need one.")
@json_option
def doctor(
    settings: str | None, folder: Path, ranks: int, num_batches: int, tokenizer: str | None, as_json: bool
) -> int:
    """Examine this machine, or a training's settings.

    Without settings: versions, GPUs, the file system (locks, rename, free space and inodes), SLURM and Ray as found,
    and what to do about each thing that is off; exit status 3 if there is one. With the settings of a training: who
    reads what, whether it can be resumed, epochs, padding, and buckets that nothing comes from. Nothing is trained.
    """
    if settings is None:
        return _examine_machine(folder, as_json=as_json)
    from sharmill.models.nemo_checkpoint import quiet_nemo
    from sharmill.training.nemo.doctor import examine
    from sharmill.training.nemo.trial import read_train_settings

    found = read_train_settings(Path(settings))
    with quiet_nemo():
        lines = examine(found, ranks=ranks, num_batches=num_batches, tokenizer=tokenizer)
        print_lines(lines, as_json=as_json)
    return OK


def _examine_machine(folder: Path, *, as_json: bool) -> int:
    from sharmill.executors.machine import examine_machine

    checks = list(examine_machine(folder))
    if as_json:
        print_json(checks)
    console = make_console()
    table = make_pairs()
    for check in checks:
        table.add_row(plain(check.name, style="bold"), plain(check.found, style="yellow" if check.to_do else ""))
        if check.to_do:
            table.add_row(plain(""), plain(f"what to do: {check.to_do}", style="yellow"))
    console.print(table)
    return FINDINGS if any(check.to_do for check in checks) else OK
