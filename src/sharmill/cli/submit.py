"""``sharmill submit``: the chains of several datasets on SLURM, submitted, shown, or waited for."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sharmill.cli.arguments import read_redo_report, redo_option, restart_option, split_arguments
from sharmill.cli.console import json_option, make_console, plain, print_json
from sharmill.cli.exit_status import FAILED, FINDINGS, OK, status_of_error, worst
from sharmill.cli.run import run_configs
from sharmill.errors import ConfigError, SharmillError
from sharmill.executors.logs import describe_error

if TYPE_CHECKING:
    from rich.console import Console

    from sharmill.config import Config
    from sharmill.engine.stage import Stage
    from sharmill.engine.unit import Unit
    from sharmill.executors.slurm.chain import JobChain
    from sharmill.executors.slurm.chain_state import ChainState
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
@click.option("--dry-run", is_flag=True, help="Show the sbatch scripts and the balance; submit nothing.")
@json_option
def submit(
    arguments: tuple[str, ...], cluster: str, profile: str | None, restart: bool, redo: str | None,
    take_over: bool, wait: bool, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    """Run stages on a cluster, each dataset in a chain of its own.

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
        f"cd {shlex.quote(str(Path.cwd()))} && "
        + shlex.join(["sharmill", "submit", *(names or ["all"]), str(Path(path).absolute()), *overrides, *options])
        for path in paths
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
    its name with the state of its chain or its error.
    """
    from sharmill.executors.slurm.chain import JobChain
    from sharmill.executors.slurm.chain_state import require_no_chain
    from sharmill.pipeline import DatasetRun, check_config, choose_stages
    from sharmill.validate.redo import take_back_commits

    chains = [
        JobChain(
            DatasetRun(config, tuple(choose_stages(config, stages))), profile, restart, command, take_over=take_over
        )
        for config, command in zip(configs, commands, strict=True)
    ]
    if redo is not None:
        for config, chain in zip(configs, chains, strict=True):
            # Ranks that are still at work would add to what is taken back.
            require_no_chain(chain.run_dir, take_over=take_over)
            check_config(config, stages)
            take_back_commits(config, redo, choose_stages(config, stages))
    started = [_guarded(console, chain, _start) for chain in chains]
    ends = [
        _guarded(console, chain, _finish) if wait and status == OK else (status, outcome)
        for chain, (status, outcome) in zip(chains, started, strict=True)
    ]
    outcomes += [{"name": chain.name} | outcome for chain, (_, outcome) in zip(chains, ends, strict=True)]
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
    """Print and return the sbatch scripts and the balance of the first stage of a dataset that has something to do, or
    that none has; what comes after it depends on its outcome."""
    from sharmill.cli.stage_status import read_or_preview_units
    from sharmill.executors.slurm.chain import JobChain
    from sharmill.pipeline import DatasetRun, check_config, choose_stages, make_stages

    chosen = choose_stages(config, stages)
    check_config(config, chosen)
    run = DatasetRun(config, tuple(chosen))
    if config.append_to is not None and run.is_whole:
        line = f"{config.name}: once all stages are done, its shards are appended to {config.append_to}"
        console.print(plain(line), soft_wrap=True)
    executor = JobChain(run, profile).executor()
    for stage in make_stages(config, chosen):
        units, done = read_or_preview_units(stage)
        left = [unit for unit in units if unit.index not in done]
        if not left:
            continue
        if workers := executor.driver_workers(stage, left):
            balance = [f"{len(left)} units in the driver job itself, on {workers} workers"]
            scripts = [executor.driver_script(stage, behind_ranks=False)]
        else:
            bins = executor.bins(stage, left)
            balance = _describe_balance(stage, bins, executor.arrays(stage, len(bins)))
            scripts = [executor.script(stage, len(bins)), executor.driver_script(stage, behind_ranks=True)]
        scripts.append(executor.watcher_script(stage))
        for line in balance:
            console.print(plain(f"{config.name}, {stage.name}: {line}"))
        for script in scripts:
            # As it is: a script with wrapped lines would be another one.
            for line in script.split("\n"):
                console.print(plain(line), soft_wrap=True)
        return {"stage": stage.name, "balance": balance, "scripts": scripts}
    console.print(plain(f"{config.name}: no unit is left to be submitted"))
    return {"stage": None, "balance": [], "scripts": []}


def _describe_balance(stage: Stage, bins: Sequence[Sequence[Unit]], arrays: Sequence[tuple[range, int]]) -> list[str]:
    loads = [sum(unit.cost for unit in units) for units in bins]
    balance = f", balance {sum(loads) / len(loads) / max(loads):.0%}" if max(loads) else ""
    parallel = sum(parallel for _, parallel in arrays)
    split = f" in {len(arrays)} job arrays, of which the first is shown" if len(arrays) > 1 else ""
    return [
        f"{sum(map(len, bins))} units on {len(bins)} ranks{split}; at most {min(parallel, len(bins))} run at once",
        f"{min(loads):.1f} to {max(loads):.1f} {stage.cost_unit} per rank{balance}",
    ]


def _start(console: Console, chain: JobChain) -> tuple[int, ChainState]:
    state = chain.start()
    console.print(plain(f"{chain.name}: {state.message}"))
    return _status(state) if state.state != "waiting" else OK, state


def _finish(console: Console, chain: JobChain) -> tuple[int, ChainState]:
    from sharmill.executors.slurm.chain_state import wait_for_end

    state = wait_for_end(chain.run_dir)
    console.print(plain(f"{chain.name}: {state.state}: {state.message}"))
    return _status(state), state


def _status(state: ChainState) -> int:
    if state.state == "failed":
        return FAILED
    return FINDINGS if state.findings else OK


def _guarded(
    console: Console, chain: JobChain, step: Callable[[Console, JobChain], tuple[int, ChainState]]
) -> tuple[int, dict[str, Any]]:
    """Return the exit status of a step, and the state after it, or its error."""
    try:
        status, state = step(console, chain)
    except SharmillError as error:
        console.print(plain(f"Error: {chain.name}: {'; '.join(error.lines)}", style="red"))
        return status_of_error(error), {"error": str(error), "code": error.code}
    return status, msgspec.to_builtins(state)
