"""The command ``submit``, which runs stages on a cluster."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from sharmill.cli.command import (
    FAILED,
    FINDINGS,
    OK,
    describe_cost,
    echo,
    echo_all,
    json_option,
    resolve_stages,
    split_arguments,
    verbose_option,
)
from sharmill.cli.run import (
    command_line,
    conclude,
    for_each_dataset,
    read_redo_report,
    redo_option,
    restart_option,
    run_configs,
    warn_if_world_writable,
)
from sharmill.config import load_config, load_typed
from sharmill.engine.executor import Submitted
from sharmill.engine.launch import pack_units
from sharmill.engine.order import choose_stages
from sharmill.engine.run_dir import RunOutcome
from sharmill.engine.stage import StageRun, is_main
from sharmill.engine.unit import Unit
from sharmill.engine.view import read_or_preview_units
from sharmill.errors import counted, refuse
from sharmill.executors.slurm.executor import SlurmExecutor, wait_for_end
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.pipeline import DatasetRun, check_config, take_back
from sharmill.registry import require_package


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="STAGE|all CONFIG... [KEY=VALUE...]")
@click.option("--cluster", type=click.Choice(["slurm", "local", "debug"]), default="slurm", show_default=True,
              help="slurm: job arrays; local: processes on this machine; debug: a single worker.")  # fmt: skip
@click.option("--profile", type=click.Path(path_type=str), metavar="FILE",
              help="YAML file with the resources of jobs; see configs/clusters.")  # fmt: skip
@restart_option
@redo_option
@click.option("--take-over", is_flag=True, help="Submit even if jobs of an earlier submission cannot be checked.")
@click.option("--wait", is_flag=True, help="Wait until all datasets are finished, and return their exit status.")
@click.option("--dry-run", is_flag=True, help="Show the jobs and their scripts without submitting them.")
@verbose_option
@json_option
def submit(
    arguments: tuple[str, ...], cluster: str, profile: str | None, restart: bool, redo: str | None,
    take_over: bool, wait: bool, dry_run: bool, verbose: bool,
) -> int:  # fmt: skip
    """Submit stages to a cluster.

    Each dataset has its own jobs. CONFIG, STAGE and KEY=VALUE have the same meaning as for sharmill run.
    """
    paths, overrides, names = split_arguments(arguments)
    stages = None if names == ["all"] else resolve_stages(names)
    refuse(
        (not names, "name a stage, or 'all'"),
        (
            dry_run and cluster != "slurm",
            "--dry-run needs --cluster slurm: use sharmill plan CONFIG to show the remaining work on this machine",
        ),
        code="bad_usage",
    )
    if cluster == "debug":
        overrides.append("executor.workers=1")
    configs = [load_config(path, overrides) for path in paths]
    named = read_redo_report(redo, configs, restart=restart)
    if cluster != "slurm":
        return conclude(run_configs(configs, stages, restart=restart, redo=named, take_over=take_over))
    require_package("submitit")
    warn_if_world_writable()
    refuse(
        (
            dry_run and named is not None,
            "--dry-run cannot be combined with --redo, which first has to discard the listed shards: leave one out",
        ),
        code="bad_usage",
    )
    loaded = load_typed(ClusterProfile, profile) if profile else ClusterProfile()
    if loaded.max_parallel_all is not None:
        # The limit on parallel ranks is divided equally among the datasets.
        loaded = replace(loaded, max_parallel_all=max(1, loaded.max_parallel_all // len(configs)))
    profile_file = str(Path(profile).absolute()) if profile else ""
    options = ["--profile", profile_file] if profile else []
    runs = []
    for path, config in zip(paths, configs, strict=True):
        # The command must work in any folder, although paths in configurations are relative to the current folder.
        again = command_line("submit", *(names or ["all"]), str(Path(path).absolute()), *overrides, *options)
        run = DatasetRun(config, tuple(choose_stages(config, stages)))
        runs.append((run, SlurmExecutor(run, loaded, again, profile_file, restart=restart, take_over=take_over)))
    if dry_run:
        pairs = [(run.name, (run, jobs)) for run, jobs in runs]
        return conclude(for_each_dataset(pairs, lambda pair: _show_submission(*pair, verbose=verbose)))
    if named is not None:
        take_back(configs[0], named, choose_stages(configs[0], stages), take_over=take_over)
    results = for_each_dataset([(run.name, jobs) for run, jobs in runs], _start)
    if wait:
        started = [(run.name, (jobs, result)) for (run, jobs), result in zip(runs, results, strict=True)]
        results = for_each_dataset(started, lambda pair: _finish(*pair))
    return conclude(results)


def _show_submission(run: DatasetRun, jobs: SlurmExecutor, *, verbose: bool) -> tuple[int, dict[str, Any]]:
    """Print and return the jobs of the first unfinished stage of a dataset, with their sbatch scripts.

    The jobs of later stages depend on the outcome of this stage, so only their limits are printed.
    """
    config = run.config
    check_config(config, run.stages)
    if config.append_to is not None and run.is_whole:
        echo(f"{config.name}: after all stages, its shards are appended to {config.append_to}")
    left: list[tuple[StageRun, list[Unit]]] = []
    for stage in run.make_stages():
        units, done = read_or_preview_units(stage, restart=jobs.restart) if not left else ([], {})
        missing = [unit for unit in units if unit.index not in done]
        if missing or left:
            left.append((stage, missing))
    if not left:
        echo(f"{config.name}: nothing left to submit")
        return OK, {"name": config.name, "stage": None, "balance": [], "scripts": [], "later": []}
    (stage, units), *behind = left
    num_ranks = 0 if jobs.workers_in_job(stage, units) else jobs.num_ranks(stage, units)
    balance = _describe_balance(stage, units, jobs, num_ranks)
    later = []
    for following in [stage for stage, _ in behind if verbose or is_main(stage.kind)]:
        may_be_own = following.resource == "cpu" and jobs.profile.driver_units
        own = ", or none if the driver job processes the units itself" if may_be_own else ""
        most = f"at most {counted(jobs.ranks_of(following).max_ranks, f'{following.resource} rank')}"
        later.append(f"{following.key if verbose else following.name}, later: {most}{own}")
    scripts = jobs.scripts(stage, num_ranks)
    echo_all(f"{config.name}, {stage.name}: {line}" for line in balance)
    for script in scripts:
        echo_all(script.split("\n"))
    echo_all(f"{config.name}, {line}" for line in later)
    return OK, {"name": config.name, "stage": stage.name, "balance": balance, "scripts": scripts, "later": later}


def _describe_balance(stage: StageRun, units: Sequence[Unit], jobs: SlurmExecutor, num_ranks: int) -> list[str]:
    """Return sentences about the jobs of a stage: their ranks, the load of each rank, and the jobs that follow them."""
    backup = "a backup driver job, which runs only if that fails (afternotok)"
    if not num_ranks:
        return [
            f"{counted(len(units), 'unit')} in the driver job itself, on "
            f"{counted(jobs.workers_in_job(stage, units), 'worker')}",
            f"then {backup}",
        ]
    loads = [sum(unit.cost for unit in part) for part in pack_units(units, num_ranks)]
    balance = f", balance {sum(loads) / len(loads) / max(loads):.0%}" if max(loads) else ""
    cost = describe_cost(sum(loads), records=stage.cost_unit == "records")
    return [
        f"{counted(len(units), 'unit')} ({cost}) on {counted(num_ranks, f'{stage.resource} rank')}; at most "
        f"{min(jobs.max_parallel(stage), num_ranks)} run at once",
        f"{min(loads):.1f} to {max(loads):.1f} {stage.cost_unit} per rank{balance}",
        f"then the driver job, after all ranks have ended (afterany), then {backup}",
    ]


def _start(jobs: SlurmExecutor) -> tuple[int, dict[str, Any]]:
    """Submit the remaining work of a dataset, and return the exit status and the JSON result."""
    name, outcome = jobs.dataset.name, jobs.start()
    echo(f"{name}: {outcome.message}")
    if isinstance(outcome, Submitted):
        return OK, {"name": name, "state": "waiting", "message": outcome.message, "jobs": outcome.jobs}
    return _describe_end(name, outcome)


def _finish(jobs: SlurmExecutor, started: tuple[int, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Wait until the submitted run of a dataset ends, and return the exit status and the JSON result."""
    if started[1].get("state") != "waiting":
        return started
    name, end = jobs.dataset.name, wait_for_end(jobs.run_dir)
    echo(f"{name}: {end.state}: {end.message}")
    return _describe_end(name, end)


def _describe_end(name: str, end: RunOutcome) -> tuple[int, dict[str, Any]]:
    status = FAILED if end.state != "done" else FINDINGS if end.findings else OK
    return status, {"name": name} | msgspec.to_builtins(end)
