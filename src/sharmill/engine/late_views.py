"""Waiting for plans, units and ranks of other nodes, which this one may see late; see ``patience``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sharmill.engine.attempts import MAX_ATTEMPTS, Attempts
from sharmill.engine.ledger import find_lost, read_ledger
from sharmill.engine.patience import Patience
from sharmill.engine.plan import load_plan
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.staging import token_staging


def wait_for_plan(stage: Stage, patience: Patience) -> None:
    """Wait until this node sees the stage's plan and the folders that ranks write to; the caller looks at them."""
    paths = stage.dir
    folders = (
        *(paths.ledger, paths.attempts, paths.taken, paths.progress, paths.metrics, paths.unit_rejects(0).parent),
        *(token_staging(stage.root, stage.token), *(stage.root / name for name in stage.folders)),
    )
    patience.wait_until(
        lambda: paths.read_token() == stage.token and all(folder.is_dir() for folder in folders),
        f"{stage.name}: the plan {stage.token}, or a folder of it,",
    )


def wait_for_ranks(stages: Sequence[Stage], name: str, token: str) -> None:
    """Wait until this node sees what ranks that have ended have done, and what the stages before left.

    Args:
        stages: those of the chain, in order.
        name: that of the stage whose ranks have ended; of those behind it nothing is there.
        token: the token of the ranks' plan.
    """
    patience = Patience(stages[-1].seconds_until_seen)
    for stage in stages:
        if stage.name == name:
            stage.token = token
            wait_for_plan(stage, patience)
            patience.wait_until(partial(_have_ranks_ended, stage), f"{stage.name}: the end of all units")
            return
        patience.wait_until(partial(_is_finished, stage), f"{stage.name}: its end")


def wait_for_units(stage: Stage, units: Sequence[Unit]) -> None:
    """Wait until this node sees that units, which ranks have reported as done, are so."""
    what = f"{stage.name}: the output of all units"
    Patience(stage.seconds_until_seen).wait_until(lambda: not _not_in_place(stage, units), what)


def _is_finished(stage: Stage) -> bool:
    return stage.dir.done.exists() and stage.is_finalized()


def _have_ranks_ended(stage: Stage) -> bool:
    """Return True if each unit is done, or given up: of ranks that were killed nothing more is to be seen."""
    attempts = Attempts(stage.dir.attempts)
    missing = _not_in_place(stage, load_plan(stage))
    return bool(attempts.stopped) or all(attempts.counts[unit.index] >= MAX_ATTEMPTS for unit in missing)


def _not_in_place(stage: Stage, units: Sequence[Unit]) -> list[Unit]:
    commits = read_ledger(stage.dir, units)
    lost = find_lost(stage, commits.values())
    return [unit for unit in units if unit.index not in commits or unit.index in lost]
