"""A driver in a process of its own: the toy stage on a Ray cluster, so that tests can end it by signals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from sharmill.cli.main import cli, main
from sharmill.engine.run import locked, run_stage
from sharmill.executors.ray import RayExecutor
from support.toy_stage import RecordingListener, ToyStage


@cli.command()
@click.argument("options")
def toy(options: str) -> int:
    values = json.loads(options)
    behaviour = {int(index): does for index, does in values.pop("behaviour", {}).items()}
    stage = ToyStage(Path(values.pop("folder")), behaviour=behaviour, **values)
    with locked(stage.run_dir) as lock:
        result = run_stage(stage, RayExecutor(), RecordingListener(), max_reject_fraction=0.5, unlocked=lock.released)
    return 0 if result.ok else 1


if __name__ == "__main__":
    main(["toy", sys.argv[1]])
