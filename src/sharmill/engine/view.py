"""A read-only view of a stage for commands to print: units, costs, rejects, ranks and pace."""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Final

from sharmill.engine.attempts import host_of
from sharmill.engine.fence import require_own_output
from sharmill.engine.notes import Notes
from sharmill.engine.plan import counts, identify, is_plan_current, read_ledger
from sharmill.engine.progress import RankProgress, in_order
from sharmill.engine.stage import StageRun, is_main
from sharmill.engine.unit import Commit, Totals, Unit, add_up
from sharmill.files.shared_disk import time_of_folder
from sharmill.files.stored import read_stored

# Number of slowest ranks and of slowest units to show.
_SLOWEST = 3
# If a device works for a smaller share of the time, the bottleneck is elsewhere.
_ENOUGH_WORK: Final = 0.8
_BOTTLENECKS: Final = {
    "decoding": "they wait for decoding: give each rank more cores, or raise executor.feeders",
    "disk": "they wait for the disk: set executor.scratch to a disk of each node, or make units longer (unit_seconds)",
    "rest": "their ranks are busy with other work: make units longer (unit_seconds) or batches larger (batch_seconds)",
}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The pace of the completed units of a stage, and the breakdown of their time.

    Attributes:
        seconds: total time of all ranks in completed units.
        on_gpu: True if the ranks had GPUs, which they may have shared.
        rate: cost per second of one rank.
        rates: the rate of each rank, by rank number.
        devices: the kinds of device used.
        slowest_ranks, slowest_units: numbers and rates of the slowest ranks and units, the slowest first.
        delays: shares of the time spent on decoding, model and disk. On a GPU, the model may work while its rank waits
            for decoding or the disk.
        worked: the share of each rank's time in which its device worked, by rank number; empty for a stage without a
            model.
        padding: the share of padding in the batches.
        hosts: number of hosts.
        memory_mb: the highest peak memory of a rank.
        memory_asked_mb: the smallest memory request of a rank's job; 0 if unknown.
    """

    seconds: float
    on_gpu: bool
    rate: float
    rates: dict[int, float]
    devices: list[str]
    slowest_ranks: list[tuple[int, float]]
    slowest_units: list[tuple[int, float]]
    delays: dict[str, float]
    worked: dict[int, float]
    padding: float
    hosts: int
    memory_mb: float
    memory_asked_mb: float

    @property
    def bottleneck(self) -> str:
        """The main reason why GPUs wait, with the remedy; "" if they work most of the time."""
        if not self.on_gpu or self.delays.get("model", 1.0) >= _ENOUGH_WORK:
            return ""
        waits = {name: self.delays.get(name, 0.0) for name in ("decoding", "disk")}
        waits["rest"] = 1.0 - sum(waits.values()) - self.delays["model"]
        padded = f"; {self.padding:.0%} of the batches is padding: longer units reduce it" if self.padding > 0.1 else ""
        return _BOTTLENECKS[max(waits, key=waits.__getitem__)] + padded


@dataclass(frozen=True, kw_only=True)
class LateUnit:
    """A unit that takes its rank much longer than its cost predicts.

    Attributes:
        unit, rank: the unit and the number of its rank.
        seconds, expected: time so far and predicted time, in seconds.
        limit: seconds after which the attempt is ended, None if there is no limit.
    """

    unit: int
    rank: int
    seconds: float
    expected: float
    limit: float | None


@dataclass(frozen=True, kw_only=True)
class StageView:
    """A snapshot of a stage.

    Attributes:
        name, state: the name and the state for display.
        cost_unit: the measure of all costs.
        units, units_done, units_running, units_failed: numbers of units.
        cost, cost_done: total cost, and processed cost including parts of units in progress.
        rate: cost that all ranks together process per second.
        rejects: number of rejected records by reason.
        ranks: the ranks that have not ended.
        now: the present time by the clock of the file system, like the ``written`` times of ranks.
        pace: the pace of the completed units, None if there is none.
        late: units that take more than ten times as long as predicted.
        longest_overdue: the longest time so far, in seconds, of a unit that takes more than twice as long as predicted.
        notes: sentences about the output of a finished stage.
    """

    name: str
    state: str
    cost_unit: str
    units: int = 0
    units_done: int = 0
    units_running: int = 0
    units_failed: int = 0
    cost: float = 0.0
    cost_done: float = 0.0
    rate: float = 0.0
    rejects: dict[str, int] = field(default_factory=dict)
    ranks: list[RankProgress] = field(default_factory=list)
    now: float = 0.0
    pace: Pace | None = None
    late: list[LateUnit] = field(default_factory=list)
    longest_overdue: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def num_rejects(self) -> int:
        return sum(self.rejects.values())

    @property
    def seconds_left(self) -> float | None:
        """The predicted remaining time in seconds; None if the stage is not under way or no prediction is possible."""
        if not self.rate or self.state != "under way" or self.late:
            return None
        seconds = (self.cost - self.cost_done) / self.rate
        # Predict at least the time of the most overdue unit, and ignore predictions of more than a century.
        return max(seconds, self.longest_overdue) if abs(seconds) < 3e9 else None


def views_of_steps(stages: Sequence[StageRun], views: Sequence[StageView]) -> list[StageView]:
    """Return one view for each step: the view of its first unfinished round, or of its main round if all are finished.

    Args:
        stages, views: all rounds and their views, in order.
    """
    found: dict[str, StageView] = {}
    for stage, view in zip(stages, views, strict=True):
        earlier = found.get(view.name)
        if earlier is not None:
            found[view.name] = view if earlier.state == "done" != view.state else earlier
        elif is_main(stage.kind) or view.state not in ("done", "not begun"):
            found[view.name] = view
    return list(found.values())


class StageReader:
    """Reader of a stage's view from its run directory; each call reads only the changes."""

    def __init__(self, stage: StageRun) -> None:
        self._stage = stage
        self._units: list[Unit] = []
        self._commits: dict[int, Commit] = {}
        self._notes: Notes | None = None
        self._seen: tuple[str, bytes] = "", b""

    def read(self, *, queued: bool = False) -> StageView:
        """Return the present view.

        Args:
            queued: True if jobs of the run are in a queue, so that a stage without ranks is waiting for them.
        """
        stage = self._stage
        if not stage.dir.units.exists():
            return StageView(name=stage.name, state="not begun", cost_unit=stage.cost_unit)
        planned = stage.with_plan(token := stage.dir.read_token())
        seen = token, read_stored(planned.ranks.launch) if planned.ranks.launch.exists() else b""
        if self._notes is None or self._seen != seen:
            self._notes, self._seen = Notes(planned, for_people=True), seen
            self._units, self._commits = stage.dir.read_units(), {}
        ids = {unit.index: unit.id for unit in self._units}
        # A stage that is only planned has no folder of heartbeats.
        with suppress(FileNotFoundError):
            for record in self._notes.new_records():
                if counts(record, token) and ids.get(record.index) == record.id:
                    self._commits[record.index] = record
        failed = {error.index for error in stage.dir.read_failures()} - set(self._commits)
        ranks, now = in_order(self._notes.ranks.values()), time_of_folder(stage.dir.path)
        return view_stage(
            stage, self._units, self._commits, ranks, now,
            totals=stage.dir.read_totals(), num_failed=len(failed), queued=queued,
        )  # fmt: skip


def view_stage(
    stage: StageRun, units: Sequence[Unit], commits: Mapping[int, Commit], ranks: Sequence[RankProgress], now: float, *,
    totals: Totals | None = None, num_failed: int = 0, queued: bool = False,
) -> StageView:  # fmt: skip
    """Return the view of a stage from its commits and the heartbeats of its ranks.

    Args:
        now: the present time by the clock of the file system.
        totals: the totals of a finished stage.
        num_failed: number of units that had failed for good when the stage last ended.
        queued: see ``StageReader.read``.
    """
    ranks = [] if totals else [rank for rank in ranks if not rank.ended]
    alive = [rank for rank in ranks if rank.is_alive(now)]
    pace = _pace(units, commits)
    overdue = _overdue_units(units, alive, pace, now)
    return StageView(
        name=stage.name,
        cost_unit=stage.cost_unit,
        state=_state(totals is not None, ranks, bool(alive), num_failed > 0, queued),
        units=len(units),
        units_done=len(commits),
        units_running=len({rank.unit for rank in alive} - set(commits) - {None}),
        units_failed=num_failed,
        cost=sum(unit.cost for unit in units),
        cost_done=sum(unit.cost for unit in units if unit.index in commits)
        + sum(rank.unit_cost_done for rank in alive if rank.unit not in commits),
        rate=sum(
            (rank.cost_done + rank.unit_cost_done) / max(rank.updated - (rank.ready or rank.started), 1.0)
            for rank in alive
        ),
        rejects=totals.rejects if totals else add_up([*commits.values()]).rejects,
        ranks=ranks,
        now=now,
        pace=pace,
        late=[unit for unit in overdue if unit.seconds > max(60.0, 10.0 * unit.expected)],
        longest_overdue=max((unit.seconds for unit in overdue), default=0.0),
        notes=totals.notes if totals else [],
    )


def _overdue_units(
    units: Sequence[Unit], ranks: Sequence[RankProgress], pace: Pace | None, now: float
) -> list[LateUnit]:
    """Return the units in progress that take more than twice as long as predicted from the completed units."""
    costs = {unit.index: unit.cost for unit in units}
    overdue = []
    for rank in ranks:
        if pace is not None and pace.rate and rank.unit in costs:
            # Use the rank's clock up to its last record, and the file system's clock after that.
            seconds = rank.updated - rank.unit_began + now - rank.written
            expected = costs[rank.unit] / pace.rate
            if seconds > 2.0 * expected:
                overdue.append(
                    LateUnit(unit=rank.unit, rank=rank.rank, seconds=seconds, expected=expected, limit=rank.unit_limit)
                )
    return overdue


def _pace(units: Sequence[Unit], commits: Mapping[int, Commit]) -> Pace | None:
    """Return the pace of the completed units, or None if none took any time."""
    seconds: Counter[int] = Counter()
    costs: Counter[int] = Counter()
    delays: Counter[str] = Counter()
    worked: Counter[int] = Counter()
    audio = padded = 0.0
    by_unit = {}
    for unit in units:
        if (commit := commits.get(unit.index)) is not None and commit.seconds > 0:
            seconds[commit.rank] += commit.seconds  # type: ignore[assignment]
            costs[commit.rank] += unit.cost  # type: ignore[assignment]
            delays.update(commit.delays)
            worked[commit.rank] += commit.delays.get("model", 0.0)  # type: ignore[assignment]
            audio += commit.stats.get("embedded_seconds", commit.stats.get("encoded_seconds", 0.0))
            padded += commit.stats.get("padded_seconds", 0.0)
            by_unit[unit.index] = unit.cost / commit.seconds
    if not (spent := sum(seconds.values())):
        return None
    by_rank = {rank: costs[rank] / seconds[rank] for rank in sorted(seconds)}
    devices = {commit.device_kind for commit in commits.values()} - {""}
    return Pace(
        seconds=spent,
        on_gpu=bool(devices - {"cpu"}),
        rate=sum(costs.values()) / spent,
        rates=by_rank,
        devices=sorted(devices),
        slowest_ranks=sorted(by_rank.items(), key=itemgetter(1))[:_SLOWEST],
        slowest_units=sorted(by_unit.items(), key=itemgetter(1))[:_SLOWEST],
        delays={name: time / spent for name, time in delays.most_common()},
        worked={rank: worked[rank] / seconds[rank] for rank in by_rank} if "model" in delays else {},
        padding=1 - audio / padded if padded else 0.0,
        hosts=len({host_of(commit.slot) for commit in commits.values()} - {""}),
        memory_mb=max(commit.memory_mb for commit in commits.values()),
        memory_asked_mb=min((c.memory_asked_mb for c in commits.values() if c.memory_asked_mb), default=0.0),
    )


def _state(finished: bool, ranks: Sequence[RankProgress], alive: bool, failed: bool, queued: bool) -> str:
    holds = {"done": finished, "under way": alive, "failed": failed, "in the queue": queued, "silent": bool(ranks)}
    return next((state for state, is_so in holds.items() if is_so), "stopped")


def read_or_preview_units(stage: StageRun, *, restart: bool = False) -> tuple[list[Unit], dict[int, Commit]]:
    """Return the units of a stage and the commits of complete units. Without a plan, make one in a temporary folder.

    Args:
        restart: ignore an existing plan, because the stage will be restarted.

    Raises:
        ConfigError: the stage cannot be planned, for instance because the stage before it is not finished, or its plan
            has another configuration, input or version.
    """
    require_own_output(stage)
    identity = identify(stage)
    if stage.dir.units.exists() and not restart and is_plan_current(stage, identity):
        units = stage.dir.read_units()
        return units, read_ledger(stage.dir, units)
    with tempfile.TemporaryDirectory(prefix="sharmill-plan-") as folder:
        return list(stage.declaration.plan(replace(stage, plan_draft=Path(folder)))), {}
