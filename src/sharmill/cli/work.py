"""``sharmill work``: ranks for a run that was begun elsewhere, as any scheduler may start them."""

from __future__ import annotations

import os
from pathlib import Path

import click

from sharmill.cli.arguments import parse_workers, workers_option
from sharmill.cli.console import json_option
from sharmill.cli.run import run_configs
from sharmill.errors import ConfigError
from sharmill.files.storage import require_private


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@workers_option
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="As executor.device.")
@json_option
def work(run_dir: Path, workers: str, device: str | None, as_json: bool) -> int:
    """Add ranks on this machine to a run, until it has ended.

    A run is begun by sharmill run, sharmill submit or a job on Ray. Any number of these may be started, at any time,
    by any scheduler: they share what is left, and whoever comes to the end of a stage first plans the next.
    """
    from sharmill.config import load_config
    from sharmill.engine.run_notes import read_given
    from sharmill.engine.rundir import RunDir

    paths = RunDir(run_dir.resolve())
    given = None
    if paths.path.is_dir():
        require_private(paths.path)
        given = read_given(paths)
    if given is None:
        message = f"no run has begun in {run_dir}: begin it with sharmill run or sharmill submit"
        raise ConfigError(message, code="no_run_dir")
    if not Path(given.folder).is_dir():
        raise ConfigError(
            f"the run was begun in {given.folder}, at which the paths of its configuration begin, and that cannot be "
            "seen here: work where it is mounted",
            code="no_run_dir",
        )
    # The paths of its configuration are relative to it.
    os.chdir(given.folder)
    overrides = [f"executor.workers={parse_workers(workers)}"]
    config = load_config(paths.config, overrides + ([f"executor.device={device}"] if device else []))
    if Path(config.run_dir).resolve() != paths.path:
        raise ConfigError(
            f"{paths.path} is the run directory {Path(config.run_dir).resolve()}, copied or moved: name that, or begin "
            "a run here",
            code="no_run_dir",
        )
    return run_configs([config], given.stages, commands=[given.command], joins=True, as_json=as_json)
