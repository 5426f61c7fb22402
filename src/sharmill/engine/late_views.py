"""Waiting for plans, units and ranks of other nodes, which this one may see late; see ``patience``."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial

from sharmill.engine.attempts import Attempts
from sharmill.engine.fence import fenced_folders
from sharmill.engine.ledger import find_outstanding, read_ledger
from sharmill.engine.patience import Patience
from sharmill.engine.plan import load_plan
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit


def wait_for_plan(stage: Stage, patience: Patience) -> None:
    """Wait until this node sees the stage's plan and the folders that ranks write to; the caller looks at them."""
    paths, folders = stage.dir, fenced_folders(stage)
    patience.wait_until(
        lambda: paths.read_token() == stage.token and all(folder.is_dir() for folder in folders),
        f"{stage.name}: the plan {stage.token}, or a folder of it,",
    )


def wait_for_stage(stages: Sequence[Stage], name: str, token: str, *, had_ranks: bool = True) -> None:
    """Wait until this node sees the plan of a stage, what its ranks have done, and what the stages before left.

    Args:
        stages: those of the run, in order.
        name: that of the stage, which is planned and not finished; of those behind it nothing is there.
        token: the token of its plan.
        had_ranks: that ranks of that plan have run and ended.
    """
    patience = Patience(stages[-1].seconds_until_seen)
    for stage in stages:
        if stage.name == name:
            stage.token = token
            wait_for_plan(stage, patience)
            if had_ranks:
                patience.wait_until(partial(_have_ranks_ended, stage), f"{stage.name}: the end of all units")
            return
        patience.wait_until(partial(_is_finished, stage), f"{stage.name}: its end")


def wait_for_units(
    stage: Stage, units: Sequence[Unit], given: Sequence[Unit], failures: Container[int]
) -> tuple[dict[int, Commit], list[Unit]]:
    """Wait until this node sees that units are done which ranks have reported as such.

    Args:
        units: all those of the stage.
        given: those that the executor was given.
        failures: the indices of units that failed for good.

    Returns: the commits whose files are in place, and the units without one.
    """
    found: tuple[dict[int, Commit], list[Unit]] = ({}, [])

    def look() -> bool:
        nonlocal found
        found = find_outstanding(stage, units, read_ledger(stage.dir, units), check=given)
        return all(unit.index in failures for unit in found[1])

    patience = Patience(stage.seconds_until_seen)
    if not patience.wait_until(look, f"{stage.name}: the output of all units"):
        # Here an error that has not passed ends the stage.
        look()
    return found


def _is_finished(stage: Stage) -> bool:
    return stage.dir.done.exists() and stage.is_finalized()


def _have_ranks_ended(stage: Stage) -> bool:
    """Return True if each unit is done, or given up: of ranks that were killed nothing more is to be seen."""
    attempts = Attempts(stage.dir.attempts)
    units = load_plan(stage)
    _, missing = find_outstanding(stage, units, read_ledger(stage.dir, units), check=units)
    return attempts.stopped is not None or all(attempts.is_given_up(unit.index, ()) for unit in missing)
