"""Defects that the shipped code once had, or might have, and that schedules of the Ray executor must find."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

from sharmill.engine import plan, worker
from sharmill.engine.outcomes import FailedAttempt
from sharmill.engine.unit import Unit
from sharmill.errors import SharmillError
from sharmill.executors.driven_rank import DrivenRank, as_answer
from sharmill.executors.ray import executor
from sharmill.executors.ray.actor import RankActor
from sharmill.executors.ray.executor import _Pool
from sharmill.executors.unit_queue import UnitQueue
from simulation import ray_world
from simulation.ray_world import Broken, run_schedule

_MOST_SCHEDULES = 1000


@dataclass(frozen=True)
class Defect:
    """A defect: what puts it back, and what is said of it by a schedule from ``seed`` on."""

    seed: int
    says: str
    changes: list[tuple[object, str, object]]


def _nothing(*arguments: object) -> None:
    pass


def _raise(pool: _Pool, rank: object, error: SharmillError) -> None:
    raise error


def _excuse(queue: UnitQueue, unit: Unit, error: FailedAttempt, most: int = 0) -> None:
    queue._waiting.append(unit)


_report_lost_unit = DrivenRank.report_lost_unit


def _count_every_loss(rank: DrivenRank, *arguments: Any, excused: bool = False) -> None:
    _report_lost_unit(rank, *arguments)


DEFECTS = {
    "ranks of a plan that was replaced go on": Defect(348, "publishes", [
        (plan, "remove_fences", _nothing), (plan, "release_output", _nothing), (worker, "require_current", _nothing),
    ]),
    "the loss of a node counts as a failure of the unit": Defect(35, "done are", [
        (DrivenRank, "report_lost_unit", _count_every_loss),
    ]),
    "a unit that takes its node down each time is excused for ever": Defect(18, "again and again", [
        (UnitQueue, "interrupted", _excuse),
    ]),
    "one node that does not see the audio ends the stage": Defect(3, "driver ends with status 1", [
        (_Pool, "_remove_unusable", _raise),
    ]),
    "one node that loses sight of the disk ends the stage": Defect(68, "driver ends with status 1", [
        (RankActor, "_stop", lambda actor, error: as_answer(error)),
    ]),
    "where good nodes are being replaced, bad ones end the stage": Defect(52, "exit statuses", [
        (executor, "_SECONDS_FOR_OTHER_NODES", 0.0),
    ]),
    "nothing limits a unit that hangs": Defect(2, "no end", [
        (ray_world, "UNIT_TIME_LIMITS", (None,)),
    ]),
}  # fmt: skip


def find_defect(defect: Defect) -> str:
    """Put a defect back, and return what a schedule says of it; nothing where none finds it."""
    with ExitStack() as stack:
        for owner, name, value in defect.changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        for seed in range(defect.seed, defect.seed + _MOST_SCHEDULES):
            try:
                run_schedule(seed)
            except Broken as error:
                if defect.says in str(error):
                    return str(error).partition("\n")[0]
    return ""
