"""``sharmill run``: all stages, or those named, of one or several datasets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sharmill.cli.arguments import (
    command_line,
    parse_workers,
    read_redo_report,
    redo_option,
    restart_option,
    split_arguments,
)
from sharmill.cli.console import json_option, make_console, plain, print_json
from sharmill.cli.exit_status import FAILED, FINDINGS, OK, status_of_error, worst
from sharmill.errors import SharmillError
from sharmill.executors.logs import describe_error, one_line

if TYPE_CHECKING:
    from sharmill.config import Config
    from sharmill.validate.findings import Report


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG... [STAGE...] [KEY=VALUE...]")
@restart_option
@redo_option
@click.option("--workers", help="Worker processes, as executor.workers: a number, or auto.")
@click.option(
    "--take-over",
    is_flag=True,
    help="Run where SLURM cannot be asked about submitted jobs; with --restart, also beside ranks that are at work.",
)
@json_option
def run(
    arguments: tuple[str, ...], restart: bool, redo: str | None, workers: str | None, take_over: bool, as_json: bool
) -> int:
    """Run all stages, or those named, for datasets. Where that is under way already, more ranks are added.

    CONFIG is a YAML file. STAGE is prepare, match (stage1), write (stage2), encode (stage3) or validate; a dataset
    without contexts (match: null) has no stage match. With encode come survey, which finds what is to be encoded, and
    assemble, which puts the codes into the dataset; each has a name of its own too.
    KEY=VALUE overrides the configuration, as in match.min_similarity=0.7.
    """
    from sharmill.config import load_config, resolve_stage

    paths, overrides, names = split_arguments(arguments)
    stages = [resolve_stage(name) for name in names] or None
    if workers is not None:
        overrides.append(f"executor.workers={parse_workers(workers)}")
    configs = [load_config(path, overrides) for path in paths]
    named = read_redo_report(redo, configs, restart=restart)
    # As it can be typed anywhere: paths in configurations are relative to this folder.
    commands = [command_line("run", str(Path(path).absolute()), *names, *overrides) for path in paths]
    return run_configs(
        configs, stages, restart=restart, redo=named, take_over=take_over, as_json=as_json, commands=commands
    )


def run_configs(
    configs: Sequence[Config], stages: Sequence[str] | None, *, restart: bool = False, redo: Report | None = None,
    json_file: str | None = None, take_over: bool = False, as_json: bool = False, commands: Sequence[str] = (),
    joins: bool = False,
) -> int:  # fmt: skip
    """Run stages, None for all, of the datasets one after the other, and return the worst exit status.

    Each of ``commands`` goes on with one of them. With ``joins`` they are gone on with as they were begun elsewhere.
    """
    from sharmill.pipeline import check_config

    # One dataset is checked by its own run; of several, a bad one must not show only after the others have run.
    for config in configs if len(configs) > 1 else ():
        check_config(config, stages)
    statuses = []
    outcomes: list[dict[str, Any]] = []
    for config, command in zip(configs, commands or [""] * len(configs), strict=True):
        try:
            statuses.append(_run_one(
                config, stages, restart=restart, redo=redo, json_file=json_file, take_over=take_over, outcomes=outcomes,
                command=command, joins=joins,
            ))  # fmt: skip
        except SharmillError as error:
            if len(configs) == 1:
                raise
            click.echo(f"Error: {one_line(config.name)}: {describe_error(error)}", err=True)
            statuses.append(status_of_error(error))
            outcomes.append({"name": config.name, "ok": False, "error": str(error), "code": error.code})
    if as_json:
        print_json(outcomes)
    return worst(statuses)


def _run_one(
    config: Config, stages: Sequence[str] | None, *, restart: bool, redo: Report | None, json_file: str | None,
    take_over: bool, outcomes: list[dict[str, Any]], command: str, joins: bool,
) -> int:  # fmt: skip
    """Run stages of one dataset, print and append its outcome, and return the exit status."""
    from sharmill.cli.progress import ProgressListener
    from sharmill.cli.results import describe_result, print_paths, print_report, print_result
    from sharmill.engine.rundir import RunDir
    from sharmill.executors.local import JoiningExecutor
    from sharmill.executors.slurm.queue import require_no_jobs
    from sharmill.files.storage import disk_errors, write_atomic
    from sharmill.pilot.predict import expect_seconds
    from sharmill.pipeline import check_config, choose_stages, make_executor, make_stages, run_dataset, stages_of
    from sharmill.report.last_step import report_on_run
    from sharmill.validate.findings import encode_report
    from sharmill.validate.redo import take_back_commits

    console = make_console()
    stages = choose_stages(config, stages)
    executor = JoiningExecutor(config.executor.workers, config.executor.device) if joins else make_executor(config)
    if redo is not None:
        # What was done is taken back only for a run that can begin.
        check_config(config, stages)
        require_no_jobs(RunDir(Path(config.run_dir)), take_over=take_over)
        take_back_commits(config, redo, stages)
    expected: dict[str, float] = {}
    if config.executor.runs_here and not restart:
        try:
            with disk_errors(Path(config.run_dir)):
                expected = expect_seconds(config, make_stages(config))
        except SharmillError as error:
            console.print(plain(f"the time left of the whole run is not known: {error}", style="dim"), soft_wrap=True)
    names = [stage.name for stage in make_stages(config, stages)]
    with ProgressListener(console, names=names, expected=expected) as listener:
        result = run_dataset(
            config, listener, stages=stages, restart=restart, executor=executor, take_over=take_over, command=command,
            joins=joins,
        )  # fmt: skip
    print_result(console, result)
    report = result.report
    if result.ok and set(stages_of(config)) <= set(stages):
        console.print(plain(report_on_run(config, make_stages(config), decode=True)), soft_wrap=True)
    if report is not None:
        print_report(console, report)
        if json_file is not None:
            write_atomic(Path(json_file), encode_report(report))
    print_paths(console, result)
    outcomes.append(describe_result(result))
    return FAILED if not result.ok else FINDINGS if report is not None and report.errors else OK
