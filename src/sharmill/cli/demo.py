"""``sharmill demo``: a corpus of its own, and all stages on it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from sharmill.cli.arguments import is_override
from sharmill.cli.console import json_option, make_console
from sharmill.cli.exit_status import OK
from sharmill.cli.run import run_configs


@click.command()
@click.argument("directory", default="demo", type=click.Path(path_type=str))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE...]")
@json_option
def demo(directory: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Run all stages on a synthetic corpus.

    Makes corpus, run directory, dataset and demo.yaml in DIRECTORY (default: demo).
    """
    from sharmill.demo import make_demo, next_steps
    from sharmill.files.storage import require_writable

    if is_override(directory):
        directory, overrides = "demo", (directory, *overrides)
    require_writable(Path(directory))
    console = make_console()
    config = make_demo(Path(directory), overrides, tell=lambda line: console.print(line, markup=False))
    status = run_configs([config], None, restart=False, as_json=as_json)
    if status == OK:
        # `make demo` calls it by its path, since its folder is not on PATH.
        command = "sharmill" if shutil.which("sharmill") else sys.argv[0]
        console.print(next_steps(config, command), markup=False, soft_wrap=True)
    return status
