"""``sharmill index``: the index of a dataset, made from its files."""

from __future__ import annotations

from pathlib import Path

import click

from sharmill.cli.console import json_option, make_console, plain, print_json
from sharmill.cli.exit_status import OK


@click.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.option("--name", help="The name of the dataset (default: as it was, or the folder's).")
@click.option("--codec", "codecs", multiple=True, metavar="NAME,KEY=VALUE,...",
              help="What the files cannot tell of a codec: codebook_size, sampling_rate ...")  # fmt: skip
@json_option
def index(dataset: str, name: str | None, codecs: tuple[str, ...], as_json: bool) -> int:
    """Make the index of a dataset from its files.

    Writes shards.jsonl and dataset.json again, or for the first time for a Shar of another tool.
    """
    from sharmill.shar.index import read_dataset
    from sharmill.shar.rebuild import parse_codec_facts, rebuild_index

    console = make_console()
    facts = [parse_codec_facts(text) for text in codecs]
    notes = []
    for line in rebuild_index(Path(dataset), facts, name=name):
        notes.append(line)
        console.print(plain(line), soft_wrap=True)
    if as_json:
        print_json({"dataset": read_dataset(Path(dataset)), "notes": notes})
    return OK
