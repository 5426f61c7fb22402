"""``sharmill verify-resume``: whether a training's data go on where they were."""

from __future__ import annotations

from pathlib import Path

import click

from sharmill.cli.console import json_option, print_lines
from sharmill.cli.exit_status import OK


@click.command("verify-resume")
@click.argument("settings", metavar="TRAIN.yaml", type=click.Path(path_type=str))
@click.option(
    "--ranks", type=click.IntRange(1), default=2, show_default=True, help="Data-parallel ranks before a stop."
)
@click.option("--then", type=click.IntRange(1), default=3, show_default=True, help="Ranks after it.")
@click.option("--batches", "num_batches", type=click.IntRange(1), default=10, show_default=True,
              help="Batches of each rank between two stops.")  # fmt: skip
@click.option("--stops", "num_stops", type=click.IntRange(1), default=3, show_default=True, help="How often to stop.")
@click.option("--tokenizer", help="As for sharmill bins; where the settings need one.")
@json_option
def verify_resume(
    settings: str, ranks: int, then: int, num_batches: int, num_stops: int, tokenizer: str | None, as_json: bool
) -> int:
    """Stop and resume a training's data.

    Takes batches, saves, restores in fresh processes and compares. Nothing is trained, and no audio is loaded.
    """
    from sharmill.training.nemo.trial import read_train_settings
    from sharmill.training.nemo.verify import stop_and_resume

    lines = stop_and_resume(
        read_train_settings(Path(settings)), ranks=ranks, then=then, num_batches=num_batches, num_stops=num_stops,
        tokenizer=tokenizer,
    )  # fmt: skip
    print_lines(lines, as_json=as_json)
    return OK
