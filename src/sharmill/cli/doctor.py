"""``sharmill doctor``: advice about the settings of a training."""

from __future__ import annotations

from pathlib import Path

import click

from sharmill.cli.exit_status import OK


@click.command()
@click.argument("settings", metavar="TRAIN.yaml", type=click.Path(path_type=str))
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Data-parallel ranks.")
@click.option("--batches", "num_batches", type=click.IntRange(1), default=100, show_default=True,
              help="Batches of the first rank to look at.")  # fmt: skip
@click.option("--tokenizer", help="As for sharmill bins; where the settings need one.")
def doctor(settings: str, ranks: int, num_batches: int, tokenizer: str | None) -> int:
    """Say what a training's loader would do.

    Who reads what, whether it can be resumed, epochs, padding, and buckets that nothing comes from. Nothing is trained.
    """
    from sharmill.training.nemo.doctor import examine
    from sharmill.training.nemo.trial import read_train_settings

    for line in examine(read_train_settings(Path(settings)), ranks=ranks, num_batches=num_batches, tokenizer=tokenizer):
        click.echo(line)
    return OK
