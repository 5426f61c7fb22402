"""The state of a stage, read from the files of its run directory; nothing is left there."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

from sharmill.config import Config
from sharmill.encode.config import CodecConfig, EncodeConfig
from sharmill.encode.stage import EncodeStage
from sharmill.engine.ledger import read_ledger
from sharmill.engine.outcomes import FailedAttempt
from sharmill.engine.plan import load_plan
from sharmill.engine.progress import RankProgress, read_progress
from sharmill.engine.reservations import require_own_output
from sharmill.engine.run import read_totals
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.files.storage import time_of_folder
from sharmill.files.stored import decode_stored, read_stored_lines
from sharmill.pipeline import config_of_run, make_stages

# Of ranks and of units.
_SLOWEST = 3
_TIMES_OVERDUE = 2.0
_TIMES_LATE = 10.0
_LEAST_SECONDS_LATE = 60.0
# Beyond a hundred years.
_MAX_SECONDS = 3e9


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The cost of what is done of a stage, and where its time went.

    Attributes:
        seconds: of all ranks, in units that are done; on GPUs, which they may share, where ``on_gpu``.
        rate: cost per second of a rank.
        slowest_ranks, slowest_units: with their own rates, the slowest first.
        delays: shares of the time: decoding, model, disk.
        hosts: how many there were.
        memory_mb: the most that a rank has held.
        memory_asked_mb: the least that one's job had asked for; 0 where that is not known.
    """

    seconds: float
    on_gpu: bool
    rate: float
    slowest_ranks: list[tuple[int, float]]
    slowest_units: list[tuple[int, float]]
    delays: dict[str, float]
    hosts: int
    memory_mb: float
    memory_asked_mb: float


@dataclass(frozen=True, kw_only=True)
class LateUnit:
    """A unit that has taken a rank far longer than its cost lets expect, in seconds; ``limit`` is when it is ended."""

    unit: int
    rank: int
    seconds: float
    expected: float
    limit: float | None


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """The state of a stage according to its files.

    Costs are in ``cost_unit``; ``cost_done`` includes what is done of the units under way, and ``rate`` is how much all
    ranks do in a second. ``ranks`` are those that have not ended; ``rejects`` counts by reason. ``now`` is by the clock
    of the file system, as the times at which ranks wrote. ``late`` are units that take ten times as long as usual, and
    ``longest_overdue`` is the time of one that takes twice as long.
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

    @property
    def units_left(self) -> int:
        return self.units - self.units_done - self.units_running - self.units_failed

    @property
    def seconds_left(self) -> float | None:
        """The predicted time, or None where no rank has a rate yet, one may hang, or the numbers make no sense."""
        if not self.rate or self.state != "under way" or self.late:
            return None
        seconds = (self.cost - self.cost_done) / self.rate
        # What has taken longer than it should will hardly end at once.
        return max(seconds, self.longest_overdue) if abs(seconds) < _MAX_SECONDS else None


def stages_of_run(config: Config) -> list[Stage]:
    """Return the stages of a configuration, and those of codecs that earlier runs added to the same run directory."""
    encode = config.section(EncodeConfig)
    folder = RunDir(Path(config.run_dir)).stage(EncodeStage.kind).path
    planned = sorted(path.name for path in folder.glob("*") if RunDir(folder).stage(path.name).units.exists())
    named = {codec.name for codec in encode.codecs}
    earlier = [CodecConfig(name=name, model="") for name in planned if name not in named]
    return make_stages(config.with_section(replace(encode, codecs=[*earlier, *encode.codecs])))


def read_stage(stage: Stage, *, queued: bool = False) -> StageStatus:
    """Return the state of a stage. ``queued`` says that a stage without ranks is one that waits for them."""
    if not stage.dir.units.exists():
        return StageStatus(name=stage.name, state="not begun", cost_unit=stage.cost_unit)
    units = load_plan(stage)
    commits = read_ledger(stage.dir, units)
    totals = read_totals(stage)
    rejects: Counter[str] = Counter()
    for commit in commits.values():
        rejects.update(commit.rejects)
    failed = {error.index for error in read_failures(stage)} - set(commits)
    ranks = [] if totals else [rank for rank in read_progress(stage.dir.progress) if not rank.ended]
    now = time_of_folder(stage.dir.path)
    alive = [rank for rank in ranks if rank.is_alive(now)]
    pace = _pace(units, commits)
    overdue = _overdue_units(units, alive, pace, now)
    return StageStatus(
        name=stage.name,
        cost_unit=stage.cost_unit,
        state=_state(totals is not None, ranks, bool(alive), bool(failed), queued),
        units=len(units),
        units_done=len(commits),
        units_running=len({rank.unit for rank in alive} - set(commits) - {None}),
        units_failed=len(failed),
        cost=sum(unit.cost for unit in units),
        cost_done=sum(unit.cost for unit in units if unit.index in commits)
        + sum(rank.unit_cost_done for rank in alive if rank.unit not in commits),
        rate=sum((rank.cost_done + rank.unit_cost_done) / max(rank.updated - rank.started, 1.0) for rank in alive),
        rejects=totals.rejects if totals else dict(rejects),
        ranks=ranks,
        now=now,
        pace=pace,
        late=[unit for unit in overdue if unit.seconds > max(_LEAST_SECONDS_LATE, _TIMES_LATE * unit.expected)],
        longest_overdue=max((unit.seconds for unit in overdue), default=0.0),
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
            if seconds > _TIMES_OVERDUE * expected:
                late = LateUnit(
                    unit=rank.unit, rank=rank.rank, seconds=seconds, expected=expected, limit=rank.unit_limit
                )
                overdue.append(late)
    return overdue


def _pace(units: Sequence[Unit], commits: Mapping[int, Commit]) -> Pace | None:
    """Return the pace of the units that are done, or None where there is none of any length."""
    seconds: Counter[int] = Counter()
    costs: Counter[int] = Counter()
    delays: Counter[str] = Counter()
    by_unit = {}
    for unit in units:
        if (commit := commits.get(unit.index)) is not None and commit.seconds > 0:
            seconds[commit.rank] += commit.seconds  # type: ignore[assignment]
            costs[commit.rank] += unit.cost  # type: ignore[assignment]
            delays.update(commit.delays)  # type: ignore[arg-type]
            by_unit[unit.index] = unit.cost / commit.seconds
    if not (spent := sum(seconds.values())):
        return None
    by_rank = {rank: costs[rank] / seconds[rank] for rank in seconds}
    return Pace(
        seconds=spent,
        on_gpu=any(commit.device_kind not in ("", "cpu") for commit in commits.values()),
        rate=sum(costs.values()) / spent,
        slowest_ranks=sorted(by_rank.items(), key=itemgetter(1))[:_SLOWEST],
        slowest_units=sorted(by_unit.items(), key=itemgetter(1))[:_SLOWEST],
        delays={name: time / spent for name, time in delays.most_common()},
        hosts=len({commit.host for commit in commits.values()} - {""}),
        memory_mb=max(commit.memory_mb for commit in commits.values()),
        memory_asked_mb=min((c.memory_asked_mb for c in commits.values() if c.memory_asked_mb), default=0.0),
    )


def stages_in(run_dir: Path) -> list[Stage]:
    """Return the stages of a run directory.

    Raises:
        ConfigError: there is none.
    """
    return stages_of_run(config_of_run(run_dir))


def _state(finished: bool, ranks: Sequence[RankProgress], alive: bool, failed: bool, queued: bool) -> str:
    if finished:
        return "done"
    if alive:
        return "under way"
    if failed:
        return "failed"
    if queued:
        return "in the queue"
    return "silent" if ranks else "stopped"


def read_failures(stage: Stage) -> list[FailedAttempt]:
    """Return the units that failed for good when the stage ended last."""
    if not stage.dir.failures.exists():
        return []
    return [decode_stored(stage.dir.failures, line, FailedAttempt) for line in read_stored_lines(stage.dir.failures)]


def read_or_preview_units(stage: Stage) -> tuple[list[Unit], dict[int, Commit]]:
    """Return the units of a stage and the commits of those that are done. Without a frozen plan they are planned aside.

    Raises:
        ConfigError: it cannot be planned, as long as the stage before it is not finished.
    """
    require_own_output(stage)
    stage.identity()
    if stage.dir.units.exists():
        units = load_plan(stage)
        return units, read_ledger(stage.dir, units)
    with tempfile.TemporaryDirectory(prefix="sharmill-plan-") as folder:
        return list(stage.plan(Path(folder))), {}
