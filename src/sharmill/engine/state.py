"""The state of a stage that is at work, as one process reads it: commits, attempts, and which ranks are alive."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from uuid import uuid4

import msgspec

from sharmill.engine.attempts import Attempts, end_attempt
from sharmill.engine.balance import pack
from sharmill.engine.fence import is_current
from sharmill.engine.ledger import iterate_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.progress import BEATS_PER_LEASE, ProgressWriter, RankProgress, read_progress
from sharmill.engine.rejects import check_rejects
from sharmill.engine.rundir import RunDir, StageDir
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import FatalError
from sharmill.files.storage import make_folder, remove_tree, time_of_folder, write_atomic
from sharmill.files.stored import RecordLog, Tail, decode_stored, read_stored

# Units without cost would all be packed into one bin.
_LEAST_COST = 1e-3
# A supervisor notes the end of its rank within a second.
_SECONDS_TO_NOTE_END = 3.0
# Of a rank that might join.
_ANOTHER_SLOT = "another host/rank"
# While none of its own heartbeats gets through for this share of a lease, a rank takes no other for dead.
_SHARE_WITHOUT_BEAT = 0.4


class Round(msgspec.Struct):
    """The division of units among the ranks of a stage, frozen until all of them have ended.

    ``bins`` are the indices of the units of each rank, none for ranks that came later. ``begun`` is how many attempts
    there had been each time that ranks were started in the run, last at these ranks. ``join_seconds`` is how long ranks
    may take to join that could do what those which are there cannot.
    """

    bins: list[list[int]]
    join_seconds: float = 0.0
    begun: list[int] = []


def begin_round(
    stage: Stage,
    missing: Sequence[Unit],
    num_ranks: int,
    *,
    join_seconds: float = 0.0,
    goes_on: bool = False,
    joins: bool = False,
) -> range:
    """Divide units among ranks by their cost, and return the numbers of the ranks; or add ranks to those at work.

    Of ranks that have all ended the claims are forgotten. The caller holds the lock of the run directory.

    Args:
        missing: the units that are to be done.
        join_seconds: as that of ``Round``.
        goes_on: the attempts of ranks that have ended count on; else they are forgotten too.
        joins: other ranks are there, or about to begin.
    """
    paths = stage.dir
    if joins:
        round = read_round(paths)
        numbers = range(len(round.bins), len(round.bins) + num_ranks)
        round.bins += [[] for _ in numbers]
    else:
        begun = read_round(paths).begun if goes_on and paths.round.exists() else []
        for folder in (paths.claims, paths.progress, *(() if goes_on else (paths.attempts,))):
            remove_tree(folder)
            make_folder(folder)
        if goes_on:
            end_attempts(paths, {unit.index for unit in missing})
        bins = [[unit.index for unit in part] for part in pack_units(missing, num_ranks)]
        numbers = range(len(bins))
        round = Round(bins, join_seconds, [*begun, Attempts(paths.attempts).num_begun])
    write_atomic(paths.round, msgspec.json.encode(round), parents=False)
    return numbers


@contextmanager
def driven_round(
    stage: Stage, missing: Sequence[Unit], num_ranks: int, *, join_seconds: float = 0.0, goes_on: bool = False
) -> Iterator[range]:
    """Begin a round, or join that of ranks at work, and give heartbeats until all have ended; see ``begin_round``.

    An error ends the context alone if another process has finished the stage, or begun it anew.
    """
    joins = bool(find_live(stage.dir, stage.lease_seconds))
    numbers = begin_round(stage, missing, num_ranks, join_seconds=join_seconds, goes_on=goes_on, joins=joins)
    path, interval = stage.dir.progress / f"driver-{uuid4().hex}.json", stage.lease_seconds / BEATS_PER_LEASE
    with ProgressWriter(path, interval=interval):
        try:
            yield numbers
        except (FatalError, FileNotFoundError):
            # Another process may have finished the stage, or begun it anew.
            if is_current(stage):
                raise


def find_workers(run_dir: RunDir, *, ranks: bool = True) -> list[str]:
    """Return a few words about each process that may be at work on a run; ``ranks`` as that of ``find_live``."""
    folders = [path.parent for pattern in ("*/ranks", "*/*/ranks") for path in run_dir.path.glob(pattern)]
    return [words for folder in sorted(folders) for words in find_live(StageDir(folder), ranks=ranks)]


def describe_workers(live: Sequence[str]) -> str:
    """Return words that name processes which are at work on a run, whatever their number."""
    more = f" and {len(live) - 3} more" if len(live) > 3 else ""
    return f"{', '.join(live[:3])}{more}"


def find_live(paths: StageDir, lease_seconds: float = Stage.lease_seconds, *, ranks: bool = True) -> list[str]:
    """Return a few words about each process that may be at work on the plan of a stage that is not finished.

    Args:
        ranks: also ranks, rather than their drivers alone; a scheduler's queue knows better than heartbeats which ranks
            are alive.
    """
    if paths.done.exists() or not paths.round.exists():
        return []
    # By the clock of the file system, as what is written there; what others have just made is seen from here on.
    now = time_of_folder(paths.ranks)
    records = read_progress(paths.progress, "*.json" if ranks else "driver-*.json")
    live = [one for one in records if one.is_alive(now, lease_seconds)]
    return [f"{f'rank {one.rank}' if one.slot else f'process {one.pid}'} on {one.host}" for one in live]


def pack_units(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """Return the units of each rank, balanced by cost; never more ranks than units, and no rank without one."""
    costs = [max(unit.cost, _LEAST_COST) for unit in units]
    return [[units[index] for index in part] for part in pack(costs, min(num_ranks, len(units))) if part]


def end_attempts(paths: StageDir, missing: Container[int]) -> None:
    """Note the end of attempts whose ranks could not do so; ``missing`` are the units without a commit."""
    notes, attempts = RecordLog(paths.attempts), Attempts(paths.attempts)
    for begun in attempts.open():
        message = f"its rank on {begun.slot} ended in the middle of it; see {paths.logs}"
        end_attempt(notes, attempts, begun, "failed" if begun.unit in missing else "done", message, message)


def read_round(paths: StageDir) -> Round:
    """Return how units were divided among the ranks of a stage."""
    return decode_stored(paths.round, read_stored(paths.round), Round)


class StageState:
    """The units of a stage that are not committed, and the attempts at them; ``look`` reads what is new of both.

    Args:
        stage: its plan is the present one.
        last_beat: returns the time of the last heartbeat of this process that got through, by ``time.monotonic``.

    Attributes:
        missing: the indices of the units that no rank has committed.
    """

    def __init__(self, stage: Stage, last_beat: Callable[[], float] = lambda: math.inf) -> None:
        self.stage = stage
        self.attempts = Attempts(stage.dir.attempts)
        self.units = load_plan(stage)
        self.round = read_round(stage.dir)
        self.missing = {index for part in self.round.bins for index in part}
        self._last_beat = last_beat
        self._given_up_since: float | None = None
        self._ledger = Tail(stage.dir.ledger)
        self._uncommitted = {unit.index: unit.id for unit in self.units}
        self._watched: dict[str, tuple[float, float]] = {}
        self._reasons: Counter[str] = Counter()
        self._num_in = 0

    def look(self) -> list[Commit]:
        """Read what is new, and return the commits of units that were missing."""
        # First the notes: of what is noted as done the commit is there.
        self.attempts.look()
        return self._read_commits()

    def is_missing(self, unit: Unit) -> bool:
        """Return True if no rank has committed a unit, as far as can be seen now."""
        self._read_commits()
        return unit.index in self.missing

    def _read_commits(self) -> list[Commit]:
        new = []
        for commit in iterate_ledger(self.stage.dir, self._uncommitted, self._ledger):
            # A second commit of a unit counts for nothing.
            del self._uncommitted[commit.index]
            self._reasons.update(commit.rejects)
            self._num_in += commit.num_in
            if commit.index in self.missing:
                self.missing.remove(commit.index)
                new.append(commit)
        return new

    def check_rejects(self) -> None:
        """Raise FatalError if more is rejected than the configuration allows."""
        check_rejects(self.stage, self.units, self._reasons, self._num_in)

    def has_ended(self) -> bool:
        """Return True if no rank can do anything more: each unit is committed or given up, or the stage is stopped."""
        if not self.missing or self.attempts.stopped is not None:
            return True
        if not (self.missing <= self.attempts.failed and self._are_given_up()):
            self._given_up_since = None
            return False
        if self._given_up_since is None:
            self._given_up_since = time.monotonic()
        is_over = time.monotonic() - self._given_up_since >= self.round.join_seconds
        return is_over or self._are_given_up(_ANOTHER_SLOT)

    def _are_given_up(self, *joining: str) -> bool:
        live = self.live_slots() | {*joining}
        return all(self.attempts.is_given_up(index, live) for index in self.missing)

    def live_slots(self) -> set[str]:
        """Return the slots of the ranks that are alive, and have loaded what they need or may do so soon."""
        lease = self.stage.lease_seconds
        # One that hangs while it loads is waited for by nobody.
        return {
            one.slot
            for one in read_progress(self.stage.dir.progress)
            if not self.is_dead(one.owner, one) and (one.ready or one.updated - one.started < lease)
        }

    def is_dead(self, owner: str, record: RankProgress | None) -> bool:
        """Return True if a rank has ended, or its heartbeat was the same for a lease by this process's clock.

        Args:
            owner: the id of its process.
            record: its heartbeat, None where there is none.
        """
        if record is not None and record.ended:
            return True
        now, lease = time.monotonic(), self.stage.lease_seconds
        beat = record.updated if record is not None else 0.0
        seen, since = self._watched.get(owner, (None, now))
        if beat != seen or now - self._last_beat() > _SHARE_WITHOUT_BEAT * lease:
            since = now
        self._watched[owner] = (beat, since)
        is_gone = record is not None and record.is_gone()
        # Its supervisor, if there is one, notes how it ended.
        return now - since >= (min(lease, _SECONDS_TO_NOTE_END) if is_gone else lease)
