"""Rates of stages, measured on what has run: time, disk and files for each unit of cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import msgspec

from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.progress import read_progress
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit


class StageRate(msgspec.Struct, frozen=True, kw_only=True):
    """The pace of a stage on one rank, and what it leaves.

    Costs are in the stage's own unit: seconds of audio, or records.

    Attributes:
        name: of the stage, with the codec where there is one.
        device: the kind of device of its ranks; "" where it needs none but a core.
        seconds_per_cost: time of a rank.
        seconds_to_start: beside its units: starting ranks, loading models, planning and the end.
        bytes_per_cost: of the files that it publishes.
        cost_per_record: cost for each record of the input, which tells the cost of a stage that cannot be planned yet.
        records_per_record: records that come into the stage, for each record of the input.
        records_per_unit: the mean of its units.
    """

    name: str
    device: str
    seconds_per_cost: float
    seconds_to_start: float
    bytes_per_cost: float
    cost_per_record: float
    records_per_record: float
    records_per_unit: float


def measure_rates(stages: Sequence[Stage], num_records: int) -> list[StageRate]:
    """Return the rates of those stages that have finished units; ``num_records`` is the size of the input."""
    found = []
    for stage in stages:
        if not stage.dir.units.exists():
            continue
        units = {unit.index: unit for unit in load_plan(stage)}
        commits = read_ledger(stage.dir, units.values())
        done = sum(units[index].cost for index in commits)
        if not done:
            continue
        files = [file for commit in commits.values() for file in commit.files]
        found.append(StageRate(
            name=stage.name,
            device=max((commit.device_kind for commit in commits.values()), default=""),
            seconds_per_cost=sum(commit.seconds for commit in commits.values()) / done,
            seconds_to_start=_seconds_to_start(stage, commits),
            bytes_per_cost=sum(file.size for file in files) / done,
            cost_per_record=sum(unit.cost for unit in units.values()) / num_records,
            records_per_record=sum(unit.size for unit in units.values()) / num_records,
            records_per_unit=fmean(unit.size for unit in units.values()),
        ))  # fmt: skip
    return found


def _seconds_to_start(stage: Stage, commits: dict[int, Commit]) -> float:
    """Return the time of a stage beside that of its busiest rank; 0 where it was not done in one go.

    By the file system's clock: from the plan, the first file that the stage writes, to the record of its end.
    """
    started = [rank.started for rank in read_progress(stage.dir.progress)]
    if not stage.dir.done.exists() or not started:
        return 0.0
    planned, ended = stage.dir.units.stat().st_mtime, stage.dir.done.stat().st_mtime
    if any(path.stat().st_mtime < min(started) for path in stage.dir.ledger.glob("*.jsonl")):
        return 0.0
    busy: Counter[int] = Counter()
    for commit in commits.values():
        busy[commit.rank] += commit.seconds  # type: ignore[assignment]
    return max(0.0, ended - planned - max(busy.values()))
