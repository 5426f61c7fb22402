"""Commands that run stages on this machine: ``run``, ``demo``, ``work``."""

import os
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec

from sharmill.cli.command import (
    FAILED,
    FINDINGS,
    OK,
    LocalPath,
    combine_exit_codes,
    current_name,
    echo,
    is_override,
    json_option,
    make_console,
    parse_workers,
    plain,
    print_json,
    print_pairs,
    resolve_stages,
    split_arguments,
    workers_option,
)
from sharmill.cli.progress import ProgressListener
from sharmill.cli.results import print_report, print_result, result_paths
from sharmill.config import Config, load_config
from sharmill.demo import make_demo, next_steps
from sharmill.engine.order import choose_stages, make_stages
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import display_name, is_main
from sharmill.errors import ConfigError, SharmillError, describe_error, printable_line, refuse
from sharmill.executors.local import JoiningExecutor
from sharmill.files.atomic import require_writable
from sharmill.files.disk import disk_errors
from sharmill.files.trust import require_private
from sharmill.pipeline import DatasetResult, check_config, run_dataset, take_back
from sharmill.rates import expect_seconds
from sharmill.report.page import report_on_run
from sharmill.validate.findings import Report, read_report

T = TypeVar("T")


restart_option = click.option(
    "--restart", is_flag=True, help="Start the stages over: discard their plans and delete their output."
)
redo_option = click.option(
    "--redo",
    type=click.Path(path_type=str),
    metavar="FINDINGS.json",
    help="Rebuild the shards listed in a validation report (written by validate --json).",
)


def conclude(results: Sequence[tuple[int, dict[str, Any]]]) -> int:
    """Print the results of datasets if ``--json`` was given, and return the combined exit status."""
    print_json([result for _, result in results])
    return combine_exit_codes(status for status, _ in results)


def for_each_dataset(
    items: Iterable[tuple[str, T]], step: Callable[[T], tuple[int, dict[str, Any]]]
) -> list[tuple[int, dict[str, Any]]]:
    """Call a function for each dataset, and return the exit status and the JSON result of each.

    An error is printed with the name of its dataset. The remaining datasets are still processed.
    """
    results = []
    for name, item in items:
        try:
            results.append(step(item))
        except SharmillError as error:
            click.echo(f"Error: {printable_line(name)}: {describe_error(error)}", err=True)
            results.append((error.exit_status, {"name": name, "ok": False, "error": str(error), "code": error.code}))
    return results


def command_line(*words: str) -> str:
    """Return a shell command that works in any folder, although its paths are relative to the current folder."""
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(['sharmill', *words])}"


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG... [STAGE...] [KEY=VALUE...]")
@restart_option
@redo_option
@click.option("--workers", callback=parse_workers, help="Worker processes, like executor.workers: a number, or auto.")
@click.option(
    "--take-over",
    is_flag=True,
    help="Run even if SLURM cannot be asked about submitted jobs; with --restart, even if workers are still running.",
)
@json_option
def run(
    arguments: tuple[str, ...], restart: bool, redo: str | None, workers: int | Literal["auto"] | None, take_over: bool
) -> int:
    """Run all or the named stages for one or more datasets.

    If the run is already in progress, add workers to it.

    CONFIG is a YAML file. STAGE is prepare, match (stage1), write (stage2), encode (stage3) or validate; a dataset
    without contexts (match: null) has no stage match. KEY=VALUE overrides a configuration key, as in
    match.min_similarity=0.7.
    """
    paths, overrides, names = split_arguments(arguments)
    stages = resolve_stages(names) or None
    if workers is not None:
        overrides.append(f"executor.workers={workers}")
    configs = [load_config(path, overrides) for path in paths]
    named = read_redo_report(redo, configs, restart=restart)
    # The commands must work in any folder, although paths in configurations are relative to the current folder.
    commands = [command_line("run", str(Path(path).absolute()), *names, *overrides) for path in paths]
    return conclude(run_configs(configs, stages, restart=restart, redo=named, take_over=take_over, commands=commands))


def warn_if_world_writable() -> None:
    """Print a warning if the umask lets all users write to the files of this process."""
    mask = os.umask(0)
    os.umask(mask)
    if not mask & stat.S_IWOTH:
        click.echo(
            f"Warning: all users may write to the files of this run, since the umask is {mask:04o}: set umask 022",
            err=True,
        )


def run_configs(
    configs: Sequence[Config], stages: Sequence[str] | None, *, restart: bool = False, redo: Report | None = None,
    take_over: bool = False, commands: Sequence[str] = (), is_joining: bool = False, json_file: str | None = None,
) -> list[tuple[int, dict[str, Any]]]:  # fmt: skip
    """Run stages for each dataset in turn, and return the exit status and the JSON result of each.

    Args:
        stages: kinds of stages; None for all.
        commands: for each dataset, the command that resumes its run.
        is_joining: add workers to runs that were started elsewhere.
        json_file: file to which the report of the checker is written.
    """

    def run_one(pair: tuple[Config, str]) -> tuple[int, dict[str, Any]]:
        config, command = pair
        result = _run_with_progress(
            config, choose_stages(config, stages), restart=restart, redo=redo, take_over=take_over, command=command,
            is_joining=is_joining,
        )  # fmt: skip
        report = result.report
        if report is not None:
            print_report(report, json_file)
        paths = result_paths(result)
        print_pairs((name, plain(path, style="bold" if name == "next" else "")) for name, path in paths.items())
        status = FAILED if not result.ok else FINDINGS if result.num_errors else OK
        return status, {
            "name": config.name,
            "ok": result.ok,
            "stages": [
                {"name": stage.name, "ok": outcome.ok, "failed_units": sorted(outcome.failures),
                 "totals": None if outcome.totals is None else msgspec.to_builtins(outcome.totals)}
                for stage, outcome in result.stages
            ],
            "findings": {"errors": result.num_errors, "checked": report is not None},
            "paths": paths,
        }  # fmt: skip

    warn_if_world_writable()
    pairs = list(zip(configs, commands or [""] * len(configs), strict=True))
    if len(pairs) == 1:
        return [run_one(pairs[0])]
    # A run checks its own configuration. With several datasets, all are checked first, so that an invalid configuration
    # is reported before hours of work on other datasets.
    for config in configs:
        check_config(config, stages)
    return for_each_dataset([(pair[0].name, pair) for pair in pairs], run_one)


def _run_with_progress(
    config: Config, stages: Sequence[str], *, restart: bool, redo: Report | None, take_over: bool, command: str,
    is_joining: bool,
) -> DatasetResult:  # fmt: skip
    """Run stages of one dataset, and print the progress, the summary and the path of the report."""
    executor = JoiningExecutor(config.executor.workers, config.executor.device) if is_joining else None
    if redo is not None:
        config.executor.check(config)
        take_back(config, redo, stages, take_over=take_over)
    expected: dict[str, float] = {}
    if config.executor.runs_here and not restart:
        try:
            with disk_errors(Path(config.run_dir)):
                expected = expect_seconds(config, make_stages(config))
        except SharmillError as error:
            echo(f"the time left of the whole run is unknown: {error}", style="dim")
    with ProgressListener(
        names=[stage.name for stage in make_stages(config, stages) if is_main(stage.kind)], expected=expected
    ) as listener:
        result = run_dataset(
            config, listener, stages=stages, restart=restart, executor=executor, take_over=take_over, command=command,
            is_joining=is_joining,
        )  # fmt: skip
    print_result(result)
    if result.ok and set(choose_stages(config)) <= set(stages):
        echo("writing the report, which can take a minute")
        echo(report_on_run(config, make_stages(config), decode=True))
    return result


def read_redo_report(path: str | None, configs: Sequence[Config], *, restart: bool) -> Report | None:
    """Return the validation report given by ``--redo``; None if the option was not given.

    Raises:
        ConfigError: the file cannot be read, or the option is combined with several datasets or with ``--restart``.
    """
    if path is None:
        return None
    refuse(
        (restart or len(configs) > 1, "--redo takes one configuration, and cannot be combined with --restart"),
        code="bad_usage",
    )
    report = read_report(Path(path))
    # Reports of earlier versions have an internal name for the step that writes codes to shards.
    names = {name: display_name(current_name(name)) for name in sorted({unit.stage for unit in report.units_to_repeat})}
    units = {msgspec.structs.replace(unit, stage=names[unit.stage]) for unit in report.units_to_repeat}
    return msgspec.structs.replace(report, units_to_repeat=sorted(units))


@click.command()
@click.argument("directory", default="demo", type=LocalPath(path_type=str))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE...]")
@json_option
def demo(directory: str, overrides: tuple[str, ...]) -> int:
    """Run all stages on a synthetic corpus.

    Create the corpus, demo.yaml, the run directory and the dataset in DIRECTORY (default: demo).
    """
    if is_override(directory):
        directory, overrides = "demo", (directory, *overrides)
    require_writable(Path(directory))
    config = make_demo(Path(directory), overrides, print_line=echo)
    status = conclude(run_configs([config], None))
    if status == OK:
        # `make demo` calls sharmill by its path, because its folder is not on PATH.
        command = "sharmill" if shutil.which("sharmill") else sys.argv[0]
        make_console().print(next_steps(config, command), markup=False, soft_wrap=True)
    return status


@click.command("work")
@click.argument("run_dir", type=click.Path(path_type=Path))
@workers_option
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Device, like executor.device.")
@json_option
def join_run(run_dir: Path, workers: int | Literal["auto"], device: str | None) -> int:
    """Add workers on this machine to a run.

    The command ends when the run ends. The run must have been started by sharmill run, sharmill submit or a Ray job.
    Any scheduler may start any number of these commands at any time. They share the remaining work, and the first one
    to complete a stage plans the next.
    """
    paths = RunDir(run_dir.resolve())
    given = None
    if paths.path.is_dir():
        require_private(paths.path)
        given = paths.read_request()
    if given is None:
        raise ConfigError(
            f"no run has been started in {run_dir}: start it with sharmill run or sharmill submit", code="no_run_dir"
        )
    if not Path(given.folder).is_dir():
        raise ConfigError(
            f"the paths of the configuration are relative to {given.folder}, which does not exist on this machine: run "
            "this command on a machine that mounts this folder",
            code="no_run_dir",
        )
    # The paths in the configuration are relative to this folder.
    os.chdir(given.folder)
    config = load_config(
        paths.config, [f"executor.workers={workers}", *([f"executor.device={device}"] if device else [])]
    )
    own = Path(config.run_dir).resolve()
    if own != paths.path:
        raise ConfigError(
            f"{paths.path} is a copy of the run directory {own}: name the original, or start a new run here",
            code="no_run_dir",
        )
    return conclude(run_configs([config], given.stages, commands=[given.command], is_joining=True))
