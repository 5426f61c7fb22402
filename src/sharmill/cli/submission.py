"""Submits the chains of several datasets to SLURM, shows what would be submitted, and waits for them if asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from sharmill.cli.preview import plan_or_load
from sharmill.cli.terminal import plain
from sharmill.config import Config
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.errors import ConfigError, SharmillError
from sharmill.executors.slurm.chain import Chain, ChainState, wait_for_end
from sharmill.executors.slurm.executor import SlurmExecutor
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.pipeline import check_config, make_stages
from sharmill.validate.report import Report

_DONE, _FAILED, _WRONG_USE, _FINDINGS = 0, 1, 2, 3


def submit_all(
    console: Console,
    configs: Sequence[Config],
    stages: Sequence[str],
    profile: ClusterProfile,
    *,
    restart: bool,
    wait: bool,
    redo: Report | None = None,
) -> list[int]:
    """The exit status of each dataset: of its submission, or with ``wait`` of its end. One dataset's error is told and
    does not keep the others from being submitted. What ``redo`` names is done again."""
    chains = [Chain(config, tuple(stages), profile, restart, redo) for config in configs]
    started = [_guarded(console, chain, _start) for chain in chains]
    if not wait:
        return started
    return [
        status if status != _DONE else _guarded(console, chain, _finish)
        for chain, status in zip(chains, started, strict=True)
    ]


def show_submission(
    console: Console, configs: Sequence[Config], stages: Sequence[str], profile: ClusterProfile
) -> None:
    """Prints, for each dataset, the sbatch script and the balance of the first stage that has something to do; what
    comes after it depends on its outcome."""
    for config in configs:
        check_config(config, stages)
        chain = Chain(config, tuple(stages), profile)
        executor = SlurmExecutor(profile, chain.run_dir.jobs, chain, config.name)
        for stage in make_stages(config, stages):
            units, done = plan_or_load(stage)
            left = [unit for unit in units if unit.index not in done]
            if not left:
                continue
            bins = executor.bins(stage, left)
            for line in _describe_balance(stage, bins, executor.arrays(len(bins))):
                console.print(plain(f"{config.name}, {stage.name}: {line}"))
            # As it is: a script with wrapped lines would be another one.
            console.print(plain(executor.script(stage, len(bins))), soft_wrap=True)
            break


def _describe_balance(stage: Stage, bins: Sequence[Sequence[Unit]], arrays: Sequence[tuple[range, int]]) -> list[str]:
    loads = [sum(unit.cost for unit in units) for units in bins]
    what = "records" if stage.name == "prepare" else "seconds of audio"
    balance = f", balance {sum(loads) / len(loads) / max(loads):.0%}" if max(loads) else ""
    parallel = sum(parallel for _, parallel in arrays)
    split = f" in {len(arrays)} job arrays, of which the first is shown" if len(arrays) > 1 else ""
    return [
        f"{sum(map(len, bins))} units on {len(bins)} ranks{split}; at most {min(parallel, len(bins))} run at once",
        f"{min(loads):.1f} to {max(loads):.1f} {what} per rank{balance}",
    ]


def _start(console: Console, chain: Chain) -> int:
    state = chain.start()
    console.print(plain(f"{chain.config.name}: {state.message}"))
    return _status(state) if state.state != "waiting" else _DONE


def _finish(console: Console, chain: Chain) -> int:
    state = wait_for_end(chain)
    console.print(plain(f"{chain.config.name}: {state.state}: {state.message}"))
    return _status(state)


def _status(state: ChainState) -> int:
    if state.state == "failed":
        return _FAILED
    return _FINDINGS if state.findings else _DONE


def _guarded(console: Console, chain: Chain, step: Callable[[Console, Chain], int]) -> int:
    try:
        return step(console, chain)
    except SharmillError as error:
        console.print(plain(f"Error: {chain.config.name}: {error}", style="red"))
        return _WRONG_USE if isinstance(error, ConfigError) else _FAILED
