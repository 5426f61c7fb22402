"""``sharmill submit``: the runs of several datasets on SLURM, submitted, shown, or waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sharmill.cli.arguments import command_line, read_redo_report, redo_option, restart_option, split_arguments
from sharmill.cli.console import describe_cost, json_option, make_console, plain, print_json
from sharmill.cli.exit_status import FAILED, FINDINGS, OK, status_of_error, worst
from sharmill.cli.run import run_configs
from sharmill.errors import ConfigError, SharmillError
from sharmill.executors.logs import describe_error

if TYPE_CHECKING:
    from rich.console import Console

    from sharmill.config import Config
    from sharmill.engine.run_notes import End
    from sharmill.engine.stage import Stage
    from sharmill.engine.unit import Unit
    from sharmill.executors.slurm.executor import SlurmExecutor
    from sharmill.executors.slurm.profile import ClusterProfile
    from sharmill.validate.findings import Report


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="STAGE|all CONFIG... [KEY=VALUE...]")
@click.option("--cluster", type=click.Choice(["slurm", "local", "debug"]), default="slurm", show_default=True,
              help="slurm: job arrays; local: processes here; debug: in this process.")  # fmt: skip
@click.option("--profile", type=click.Path(path_type=str), help="What ranks need: a YAML file in configs/clusters.")
@restart_option
@redo_option
@click.option("--take-over", is_flag=True, help="Submit although jobs may be left that nobody here can be asked about.")
@click.option("--wait", is_flag=True, help="Wait until all datasets are done, and return how that ended.")
@click.option("--dry-run", is_flag=True, help="Show what would be submitted, with the scripts; submit nothing.")
@json_option
def submit(
    arguments: tuple[str, ...], cluster: str, profile: str | None, restart: bool, redo: str | None,
    take_over: bool, wait: bool, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    """Run stages on a cluster, each dataset with jobs of its own.

    CONFIG, STAGE and KEY=VALUE are those of sharmill run.
    """
    from sharmill.config import load_config, resolve_stage
    from sharmill.executors.slurm.profile import ClusterProfile, load_profile
    from sharmill.registry import require_package

    paths, overrides, names = split_arguments(arguments)
    stages = None if names == ["all"] else [resolve_stage(name) for name in names]
    if stages == []:
        raise ConfigError("name a stage, or 'all'", code="bad_usage")
    if cluster == "debug":
        overrides.append("executor.workers=1")
    configs = [load_config(path, overrides) for path in paths]
    named = read_redo_report(redo, configs, restart=restart)
    if cluster != "slurm":
        return run_configs(configs, stages, restart=restart, redo=named, take_over=take_over, as_json=as_json)
    require_package("submitit", extra="slurm")
    loaded = (load_profile(profile) if profile else ClusterProfile()).among(len(configs))
    console = make_console()
    outcomes: list[dict[str, Any]] = []
    if dry_run:
        if named is not None:
            raise ConfigError(
                "--dry-run shows what is left to do; with --redo that would have to be taken back first",
                code="bad_usage",
            )
        statuses = [_show_guarded(console, config, stages, loaded, outcomes) for config in configs]
        if as_json:
            print_json(outcomes)
        return worst(statuses)
    options = ["--profile", str(Path(profile).absolute())] if profile else []
    # As it can be typed anywhere: paths in configurations are relative to this folder.
    again = [
        command_line("submit", *(names or ["all"]), str(Path(path).absolute()), *overrides, *options) for path in paths
    ]
    statuses = submit_all(
        console, configs, stages, loaded, restart=restart, wait=wait, redo=named, commands=again, outcomes=outcomes,
        take_over=take_over,
    )  # fmt: skip
    if as_json:
        print_json(outcomes)
    return worst(statuses)


def submit_all(
    console: Console,
    configs: Sequence[Config],
    stages: Sequence[str] | None,
    profile: ClusterProfile,
    *,
    restart: bool,
    wait: bool,
    redo: Report | None,
    commands: Sequence[str],
    outcomes: list[dict[str, Any]],
    take_over: bool = False,
) -> list[int]:
    """Submit stages (None: all) of each dataset and return the exit statuses: of the submissions, or with ``wait`` of
    the ends.

    An error of one dataset is printed and does not keep the others from being submitted. The units that ``redo`` names
    are done again. ``commands`` are what submits each of them again, to be shown. ``outcomes`` gets, for each dataset,
    its name with what was submitted, its end or its error.
    """
    from sharmill.cli.dataset_run import DatasetRun
    from sharmill.executors.slurm.executor import SlurmExecutor
    from sharmill.executors.slurm.queue import require_no_jobs
    from sharmill.pipeline import check_config, choose_stages
    from sharmill.validate.redo import take_back_commits

    runs = [
        SlurmExecutor(
            DatasetRun(config, tuple(choose_stages(config, stages))), profile, command, restart=restart,
            take_over=take_over,
        )
        for config, command in zip(configs, commands, strict=True)
    ]  # fmt: skip
    if redo is not None:
        for config, run in zip(configs, runs, strict=True):
            # Ranks that are still at work would add to what is taken back.
            require_no_jobs(run.run_dir, take_over=take_over)
            check_config(config, stages)
            take_back_commits(config, redo, choose_stages(config, stages))
    started = [_guarded(console, run, _start) for run in runs]
    ends = [
        _guarded(console, run, _finish) if wait and outcome.get("state") == "waiting" else (status, outcome)
        for run, (status, outcome) in zip(runs, started, strict=True)
    ]
    outcomes += [{"name": run.dataset.name} | outcome for run, (_, outcome) in zip(runs, ends, strict=True)]
    return [status for status, _ in ends]


def _show_guarded(
    console: Console, config: Config, stages: Sequence[str] | None, profile: ClusterProfile,
    outcomes: list[dict[str, Any]],
) -> int:  # fmt: skip
    try:
        outcomes.append({"name": config.name} | show_submission(console, config, stages, profile))
    except SharmillError as error:
        click.echo(f"Error: {describe_error(error)}", err=True)
        outcomes.append({"name": config.name, "error": str(error), "code": error.code})
        return status_of_error(error)
    return OK


def show_submission(
    console: Console, config: Config, stages: Sequence[str] | None, profile: ClusterProfile
) -> dict[str, Any]:
    """Print and return all jobs that are known now, with their sbatch scripts: those of the first stage of a dataset
    that has something to do. What comes after it depends on its outcome; of later stages only the resource is known."""
    from sharmill.cli.dataset_run import DatasetRun
    from sharmill.cli.stage_status import read_or_preview_units
    from sharmill.executors.slurm.executor import SlurmExecutor
    from sharmill.pipeline import check_config, choose_stages, make_stages

    chosen = choose_stages(config, stages)
    check_config(config, chosen)
    run = DatasetRun(config, tuple(chosen))
    if config.append_to is not None and run.is_whole:
        line = f"{config.name}: once all stages are done, its shards are appended to {config.append_to}"
        console.print(plain(line), soft_wrap=True)
    jobs = SlurmExecutor(run, profile)
    left: list[tuple[Stage, list[Unit]]] = []
    for stage in make_stages(config, chosen):
        units, done = read_or_preview_units(stage) if not left else ([], {})
        missing = [unit for unit in units if unit.index not in done]
        if missing or left:
            left.append((stage, missing))
    if not left:
        console.print(plain(f"{config.name}: no unit is left to be submitted"))
        return {"stage": None, "balance": [], "scripts": [], "later": []}
    (stage, units), *behind = left
    num_ranks = 0 if jobs.workers_in_job(stage, units) else jobs.num_ranks(stage, units)
    balance = _describe_balance(stage, units, jobs, num_ranks)
    later = [_describe_later(stage, jobs) for stage, _ in behind]
    scripts = jobs.scripts(stage, num_ranks)
    for line in balance:
        console.print(plain(f"{config.name}, {stage.name}: {line}"))
    for script in scripts:
        # As it is: a script with wrapped lines would be another one.
        for line in script.split("\n"):
            console.print(plain(line), soft_wrap=True)
    for line in later:
        console.print(plain(f"{config.name}, {line}"))
    return {"stage": stage.name, "balance": balance, "scripts": scripts, "later": later}


def _describe_balance(stage: Stage, units: Sequence[Unit], jobs: SlurmExecutor, num_ranks: int) -> list[str]:
    """Return sentences about the units of a stage: who does them, and what waits for whom."""
    from sharmill.engine.state import pack_units

    behind = "the job behind it, which runs only if that fails (afternotok)"
    if not num_ranks:
        workers = jobs.workers_in_job(stage, units)
        return [f"{len(units)} units in the advance job itself, on {workers} workers", f"then {behind}"]
    loads = [sum(unit.cost for unit in part) for part in pack_units(units, num_ranks)]
    balance = f", balance {sum(loads) / len(loads) / max(loads):.0%}" if max(loads) else ""
    cost = describe_cost(sum(loads), records=stage.cost_unit == "records")
    return [
        f"{len(units)} units ({cost}) on {num_ranks} {stage.resource} ranks; at most "
        f"{min(jobs.max_parallel(stage), num_ranks)} run at once",
        f"{min(loads):.1f} to {max(loads):.1f} {stage.cost_unit} per rank{balance}",
        f"then the advance job, once the ranks have ended (afterany), then {behind}",
    ]


def _describe_later(stage: Stage, jobs: SlurmExecutor) -> str:
    may_be_own = stage.resource == "cpu" and jobs.profile.driver_units
    own = ", or few units in the advance job itself" if may_be_own else ""
    return f"{stage.name}, later: at most {jobs.ranks_of(stage).max_ranks} {stage.resource} ranks{own}"


def _start(console: Console, run: SlurmExecutor) -> tuple[int, dict[str, Any]]:
    from sharmill.engine.outcomes import Submitted

    outcome = run.start()
    console.print(plain(f"{run.dataset.name}: {outcome.message}"))
    if isinstance(outcome, Submitted):
        return OK, {"state": "waiting", "message": outcome.message, "jobs": outcome.jobs}
    return _status(outcome), msgspec.to_builtins(outcome)


def _finish(console: Console, run: SlurmExecutor) -> tuple[int, dict[str, Any]]:
    from sharmill.executors.slurm.queue import wait_for_end

    end = wait_for_end(run.run_dir)
    console.print(plain(f"{run.dataset.name}: {end.state}: {end.message}"))
    return _status(end), msgspec.to_builtins(end)


def _status(end: End) -> int:
    if end.state != "done":
        return FAILED
    return FINDINGS if end.findings else OK


def _guarded(
    console: Console, run: SlurmExecutor, step: Callable[[Console, SlurmExecutor], tuple[int, dict[str, Any]]]
) -> tuple[int, dict[str, Any]]:
    """Return the exit status of a step, and what there is to tell after it, or its error."""
    try:
        return step(console, run)
    except SharmillError as error:
        console.print(plain(f"Error: {run.dataset.name}: {'; '.join(error.lines)}", style="red"))
        return status_of_error(error), {"error": str(error), "code": error.code}
