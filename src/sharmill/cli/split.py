"""``sharmill split``: train, valid and test of one dataset."""

from __future__ import annotations

import click

from sharmill.cli.arguments import parse_workers, workers_option
from sharmill.cli.console import json_option, make_console, make_table, plain, print_json
from sharmill.cli.exit_status import OK
from sharmill.errors import ConfigError


@click.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.argument("out", type=click.Path(path_type=str))
@click.option("--by-speaker", is_flag=True, required=True, help="No two splits have a speaker in common.")
@click.option("--valid", metavar="SHARE", help="Share of the seconds for valid: 1%.")
@click.option("--test", metavar="SHARE", help="Share of the seconds for test.")
@click.option("--seed", default=42, show_default=True, help="Makes the choice of speakers.")
@click.option("--shard-size", type=click.IntRange(1), help="Cuts of a shard (default: as in DATASET).")
@click.option("--restart", is_flag=True, help="Discard what an interrupted split has left, instead of going on.")
@workers_option
@json_option
def split(
    dataset: str, out: str, by_speaker: bool, valid: str | None, test: str | None, seed: int, shard_size: int | None,
    restart: bool, workers: str, as_json: bool,
) -> int:  # fmt: skip
    """Divide a dataset by speakers.

    Writes OUT/train, OUT/valid and OUT/test, datasets whose audio and codes are copied. DATASET stays as it is.
    """
    from sharmill.cli.progress import ProgressListener
    from sharmill.grow.split import split_dataset

    shares = {name: _parse_share(name, text) for name, text in (("valid", valid), ("test", test)) if text is not None}
    if not shares:
        raise ConfigError("say how much goes into --valid or --test, as in --valid 1%", code="bad_usage")
    console = make_console()
    with ProgressListener(console) as listener:
        splits = split_dataset(
            dataset, out, shares, seed=seed, shard_size=shard_size, workers=parse_workers(workers), listener=listener,
            restart=restart,
        )  # fmt: skip
    total = sum(part.record.target_seconds for part in splits)
    table = make_table(None, ("split", "speakers", "cuts", "hours", "share", "shards"), left=("split",))
    for part in splits:
        record = part.record
        row = (str(part.num_speakers), str(record.num_cuts), f"{record.target_seconds / 3600:.3f}")
        table.add_row(plain(part.name), *row, f"{record.target_seconds / total:.2%}", str(record.num_shards))
    console.print(table)
    console.print(f"{sum(part.record.num_cuts for part in splits)} cuts, each in exactly one split")
    if as_json:
        print_json(splits)
    return OK


def _parse_share(name: str, text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ConfigError(f"--{name} {text}: write a share such as 1% or 0.01", code="bad_usage") from None
