"""The state of a stage, read from the files of its run directory; nothing is left there."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sharmill.config import CodecConfig, Config
from sharmill.engine.ledger import read_ledger
from sharmill.engine.outcomes import FailedAttempt
from sharmill.engine.plan import load_plan
from sharmill.engine.progress import RankProgress, read_progress
from sharmill.engine.run import read_totals
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.stored import decode_stored, read_stored_lines
from sharmill.engine.unit import Commit, Unit
from sharmill.pipeline import make_stages
from sharmill.storage import clock_of

# Beyond a hundred years.
_MAX_SECONDS = 3e9


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """The state of a stage according to its files.

    Costs are in ``cost_unit``; ``cost_done`` includes what is done of the units under way, and ``rate`` is how much all
    ranks do in a second. ``ranks`` are those that have not ended; ``rejects`` counts by reason. ``now`` is by the clock
    of the file system, as the times at which ranks wrote.
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

    @property
    def units_left(self) -> int:
        return self.units - self.units_done - self.units_running - self.units_failed

    @property
    def seconds_left(self) -> float | None:
        """The predicted time, or None where no rank has a rate yet, or the numbers make no sense."""
        if not self.rate or self.state != "under way":
            return None
        seconds = (self.cost - self.cost_done) / self.rate
        return seconds if abs(seconds) < _MAX_SECONDS else None


def stages_of_run(config: Config) -> list[Stage]:
    """Return the stages of a configuration, and those of codecs that earlier runs added to the same run directory."""
    encode = RunDir(Path(config.run_dir)).stage("encode").path
    planned = sorted(path.name for path in encode.glob("*") if RunDir(encode).stage(path.name).units.exists())
    named = {codec.name for codec in config.encode.codecs}
    earlier = [CodecConfig(name=name, model="") for name in planned if name not in named]
    codecs = [*earlier, *config.encode.codecs]
    return make_stages(replace(config, encode=replace(config.encode, codecs=codecs)))


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
    now = clock_of(stage.dir.path)
    alive = [rank for rank in ranks if not rank.is_silent(now)]
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
    )


def _state(finished: bool, ranks: Sequence[RankProgress], alive: bool, failed: bool, queued: bool) -> str:
    if finished:
        return "done"
    if alive:
        return "under way"
    if failed:
        return "failed"
    if ranks:
        return "silent"
    return "in the queue" if queued else "stopped"


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
    stage.identity()
    if stage.dir.units.exists():
        units = load_plan(stage)
        return units, read_ledger(stage.dir, units)
    with tempfile.TemporaryDirectory(prefix="sharmill-plan-") as folder:
        return list(stage.plan(Path(folder))), {}
