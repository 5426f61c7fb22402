"""A driver in a process of its own: the toy stage as a command of sharmill, so that tests can end it by signals."""

import json
import sys
from pathlib import Path

import click

from sharmill.cli.main import cli, main
from support.toy_stage import ToyStage, run


@cli.command()
@click.argument("options")
def toy(options: str) -> int:
    values = json.loads(options)
    workers = values.pop("workers")
    behaviour = {int(index): does for index, does in values.pop("behaviour", {}).items()}
    stage = ToyStage(Path(values.pop("folder")), behaviour=behaviour, **values)
    result, _ = run(stage, workers)
    print("ok" if result.ok else "failed")
    return 0 if result.ok else 1


if __name__ == "__main__":
    main(["toy", sys.argv[1]])
