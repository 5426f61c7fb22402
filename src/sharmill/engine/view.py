"""One view of a stage at work or done: units, costs, rejects, ranks, pace. Commands print it; nothing is written."""

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
from sharmill.engine.plan import counts, read_ledger
from sharmill.engine.progress import RankProgress, in_order
from sharmill.engine.stage import StageRun, is_main
from sharmill.engine.unit import Commit, Totals, Unit, add_up
from sharmill.files.shared_disk import time_of_folder
from sharmill.files.stored import read_stored

# Of ranks and of units.
_SLOWEST = 3
# A device that works for less of its time is waiting for something.
_ENOUGH_WORK: Final = 0.8
_HINDRANCES: Final = {
    "decoding": "they wait for decoding: give each rank more cores, or set executor.feeders to more",
    "disk": "they wait for the disk: set executor.scratch to a disk of each node, or make units longer (unit_seconds)",
    "rest": "their ranks are busy with other work: make units longer (unit_seconds) or batches larger (batch_seconds)",
}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The cost of what is done of a stage, and where its time went.

    Attributes:
        seconds: of all ranks, in units that are done; on GPUs, which they may share, where ``on_gpu``.
        rate: cost per second of a rank.
        rates: that of each rank.
        devices: their kinds.
        slowest_ranks, slowest_units: with their own rates, the slowest first.
        delays: shares of the time: decoding, model, disk. On a GPU the model may work while its rank waits for more.
        worked: by rank, the share of its time in which its device worked; empty for a stage without a model.
        padding: the share of the audio in batches that is padding.
        hosts: how many there were.
        memory_mb: the most that a rank has held.
        memory_asked_mb: the least that one's job had asked for; 0 where that is not known.
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
    def hindrance(self) -> str:
        """The reason for which GPUs wait, and the remedy; "" if they work for most of the time."""
        if not self.on_gpu or self.delays.get("model", 1.0) >= _ENOUGH_WORK:
            return ""
        waits = {name: self.delays.get(name, 0.0) for name in ("decoding", "disk")}
        waits["rest"] = 1.0 - sum(waits.values()) - self.delays["model"]
        padded = f"; {self.padding:.0%} of the batches is padding: longer units have less" if self.padding > 0.1 else ""
        return _HINDRANCES[max(waits, key=waits.__getitem__)] + padded


@dataclass(frozen=True, kw_only=True)
class LateUnit:
    """A unit that has taken a rank far longer than its cost lets expect, in seconds; ``limit`` is when it is ended."""

    unit: int
    rank: int
    seconds: float
    expected: float
    limit: float | None


@dataclass(frozen=True, kw_only=True)
class StageView:
    """The state of a stage.

    Costs are in ``cost_unit``; ``cost_done`` includes what is done of the units under way, and ``rate`` is how much all
    ranks do in a second. ``ranks`` are those that have not ended; ``rejects`` counts by reason. ``now`` is by the clock
    of the file system, as the times at which ranks wrote. ``late`` are units that take ten times as long as usual, and
    ``longest_overdue`` is the time of one that takes twice as long. ``notes`` are sentences about the output of a
    finished stage.
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
        """The predicted time, or None where no rank has a rate yet, one may hang, or the numbers make no sense."""
        if not self.rate or self.state != "under way" or self.late:
            return None
        seconds = (self.cost - self.cost_done) / self.rate
        # At least as long as the most overdue unit. Predictions of more than a century are ignored.
        return max(seconds, self.longest_overdue) if abs(seconds) < 3e9 else None


def views_of_steps(stages: Sequence[StageRun], views: Sequence[StageView]) -> list[StageView]:
    """Return one view for each step: the view of its first round that is not done, or else of its main one.

    Args:
        stages, views: of all rounds, in their order.
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
    """The view of a stage by the files of its run directory; each time it is read, only what has changed is."""

    def __init__(self, stage: StageRun) -> None:
        self._stage = stage
        self._units: list[Unit] = []
        self._commits: dict[int, Commit] = {}
        self._notes: Notes | None = None
        self._seen: tuple[str, bytes] = "", b""

    def read(self, *, queued: bool = False) -> StageView:
        """Return the present view.

        ``queued`` says that a stage without ranks is one that waits for them.
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
        # A finished stage has heartbeats of ranks that have ended; one that was planned only has none.
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
    """Return the view of a stage by its commits and the heartbeats of its ranks.

    Args:
        now: by the clock of the file system.
        totals: of a finished stage.
        num_failed: how many units failed for good when the stage ended last.
        queued: as that of ``StageReader``.
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
    """Return the units under way that take twice as long as the others did."""
    costs = {unit.index: unit.cost for unit in units}
    overdue = []
    for rank in ranks:
        if pace is not None and pace.rate and rank.unit in costs:
            # The rank's own clock, and that of the file system since.
            seconds = rank.updated - rank.unit_began + now - rank.written
            expected = costs[rank.unit] / pace.rate
            if seconds > 2.0 * expected:
                overdue.append(
                    LateUnit(unit=rank.unit, rank=rank.rank, seconds=seconds, expected=expected, limit=rank.unit_limit)
                )
    return overdue


def _pace(units: Sequence[Unit], commits: Mapping[int, Commit]) -> Pace | None:
    """Return the pace of the units that are done, or None where there is none of any length."""
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


def read_or_preview_units(stage: StageRun, *, anew: bool = False) -> tuple[list[Unit], dict[int, Commit]]:
    """Return the units of a stage and the commits of those that are done. Without a frozen plan they are planned aside.

    Args:
        anew: the stage is to begin anew, whatever is done of it.

    Raises:
        ConfigError: it cannot be planned, as long as the stage before it is not finished.
    """
    require_own_output(stage)
    stage.declaration.identity(stage)
    if stage.dir.units.exists() and not anew:
        units = stage.dir.read_units()
        return units, read_ledger(stage.dir, units)
    with tempfile.TemporaryDirectory(prefix="sharmill-plan-") as folder:
        return list(stage.declaration.plan(replace(stage, plan_aside=Path(folder)))), {}
