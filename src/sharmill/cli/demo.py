"""``sharmill demo``: a corpus of its own, and all stages on it."""

from __future__ import annotations

from pathlib import Path

import click

from sharmill.cli.arguments import is_override
from sharmill.cli.run import run_configs


@click.command()
@click.argument("directory", default="demo", type=click.Path(path_type=str))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE...]")
def demo(directory: str, overrides: tuple[str, ...]) -> int:
    """Run all stages on a synthetic corpus.

    Makes corpus, run directory, dataset and demo.yaml in DIRECTORY (default: demo).
    """
    from sharmill.cli.console import make_console
    from sharmill.config import STAGES
    from sharmill.demo.run import make_demo
    from sharmill.storage import require_writable

    if is_override(directory):
        directory, overrides = "demo", (directory, *overrides)
    require_writable(Path(directory))
    console = make_console()
    config = make_demo(Path(directory), overrides, tell=lambda line: console.print(line, markup=False))
    return run_configs([config], list(STAGES), restart=False)
