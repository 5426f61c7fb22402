"""The state of a stage that is at work, as one process reads it: commits, attempts, and which ranks are alive."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress

import msgspec

from sharmill.engine.attempts import AttemptLog, Attempts, NoteKind
from sharmill.engine.balance import pack
from sharmill.engine.host import is_gone, state_and_start, this_kernel
from sharmill.engine.ledger import iterate_ledger, read_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.progress import RankProgress, read_progress
from sharmill.engine.rejects import check_rejects
from sharmill.engine.rundir import RunDir, StageDir
from sharmill.engine.stage import Stage
from sharmill.engine.stored import Tail, decode_stored, read_stored
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import SharmillError
from sharmill.storage import make_folder, open_stored, remove_tree, time_of_folder, write_atomic

# Units without cost would all be packed into one bin.
_LEAST_COST = 1e-3
# A supervisor notes the end of its rank within a second.
_SECONDS_TO_NOTE_END = 3.0
# Of a rank that might join.
_ANOTHER_SLOT = "another host/rank"
# While none of its own heartbeats gets through for this share of a lease, a rank takes no other for dead.
_SHARE_WITHOUT_BEAT = 0.4


class Starter(msgspec.Struct, frozen=True):
    """A process that has started ranks and waits for their end."""

    host: str
    kernel: str
    pid: int
    started: int


class Round(msgspec.Struct):
    """The values that the ranks of a stage are started with, frozen until all of them have ended.

    ``bins`` are the indices of the units of each rank.
    ``num_joined`` ranks came later, and have no bins; ``starters`` are those that wait for the end of ranks. ``begun``
    is how many attempts there had been each time that ranks were started in the run, last at these ranks.
    """

    bins: list[list[int]]
    num_joined: int = 0
    starters: list[Starter] = []
    begun: list[int] = []


def begin_round(
    stage: Stage,
    missing: Sequence[Unit],
    num_ranks: int,
    *,
    goes_on: bool = False,
    joins: bool = False,
    waits: bool = True,
) -> range:
    """Divide units among ranks by their cost, and return the numbers of the ranks; or add ranks to those at work.

    Of ranks that have all ended the claims are forgotten. The caller holds the lock of the run directory.

    Args:
        missing: the units that are to be done.
        goes_on: the attempts of ranks that have ended count on; else they are forgotten too.
        joins: ranks are there, or about to begin, although none can be seen.
        waits: as that of the executor; one that waits calls ``end_round`` then.
    """
    paths = stage.dir
    if joins or find_live(paths, stage.lease_seconds, ranks=waits):
        round = read_round(paths)
        first = len(round.bins) + round.num_joined
        numbers = range(first, first + num_ranks)
        round.num_joined += num_ranks
    else:
        round = _divide(paths, missing, num_ranks, goes_on=goes_on)
        numbers = range(len(round.bins))
    if waits:
        round.starters.append(_this_process())
    _write_round(paths, round)
    return numbers


def end_round(stage: Stage) -> None:
    """Note that this process does not wait for ranks any more; where that cannot be noted, its end will say so."""
    # The folder may have gone with the plan, and an error of the disk is to be told by the work that has met it.
    with suppress(OSError, SharmillError):
        round = read_round(stage.dir)
        round.starters = [one for one in round.starters if one != _this_process()]
        _write_round(stage.dir, round)


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
        ranks: also ranks that nobody waits for; a scheduler's queue knows better than their heartbeats which are alive.
    """
    if paths.done.exists():
        return []
    if not paths.ranks.is_dir():
        return []
    # By the clock of the file system, as what is written there; what others have just made is seen from here on.
    oldest = time_of_folder(paths.ranks) - lease_seconds
    try:
        with open_stored(paths.round) as stream:
            round, written = decode_stored(paths.round, stream.read(), Round), os.fstat(stream.fileno()).st_mtime
    except FileNotFoundError:
        return []
    starters = [
        f"process {one.pid} on {one.host}"
        for one in round.starters
        if (not is_gone(one.pid, one.started) if one.kernel == this_kernel() else written > oldest)
    ]
    return starters + [
        f"rank {record.rank} on {record.host}"
        for record in (read_progress(paths.progress) if ranks else ())
        if not record.ended and not record.is_gone() and record.written > oldest
    ]


def _this_process() -> Starter:
    return Starter(socket.gethostname(), this_kernel(), os.getpid(), state_and_start(os.getpid())[1])


def _write_round(paths: StageDir, round: Round) -> None:
    write_atomic(paths.round, msgspec.json.encode(round), parents=False)


def _divide(paths: StageDir, missing: Sequence[Unit], num_ranks: int, *, goes_on: bool) -> Round:
    begun = read_round(paths).begun if goes_on and paths.round.exists() else []
    for folder in (paths.claims, paths.progress, *(() if goes_on else (paths.attempts,))):
        remove_tree(folder)
        make_folder(folder)
    if goes_on:
        end_attempts(paths, {unit.index for unit in missing})
    attempts = Attempts(paths.attempts)
    attempts.look()
    bins = [[unit.index for unit in part] for part in pack_units(missing, num_ranks)]
    return Round(bins, begun=[*begun, attempts.num_begun])


def pack_units(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """Return the units of each rank, balanced by cost; never more ranks than units, and no rank without one."""
    costs = [max(unit.cost, _LEAST_COST) for unit in units]
    return [[units[index] for index in part] for part in pack(costs, min(num_ranks, len(units))) if part]


def end_attempts(paths: StageDir, missing: Container[int]) -> None:
    """Note the end of attempts whose ranks could not do so; ``missing`` are the units without a commit."""
    attempts, notes = Attempts(paths.attempts), AttemptLog(paths.attempts)
    attempts.look()
    for begun in attempts.open():
        message = f"its rank on {begun.slot} ended in the middle of it; see {paths.logs}"
        kind: NoteKind = "failed" if begun.unit in missing else "done"
        notes.add(msgspec.structs.replace(begun, kind=kind, message=message, traceback=message))


def read_round(paths: StageDir) -> Round:
    """Return what the ranks of a stage were started with."""
    return decode_stored(paths.round, read_stored(paths.round), Round)


class StageState:
    """The units of a stage that are not committed, and the attempts at them; ``look`` reads what is new of both.

    Args:
        stage: its plan is the present one.
        last_beat: returns the time of the last heartbeat of this process that got through, by ``time.monotonic``.
        join_seconds: how long ranks may take to join that could do what those which are there cannot.

    Attributes:
        missing: the indices of the units that no rank has committed.
    """

    def __init__(
        self,
        stage: Stage,
        last_beat: Callable[[], float] = lambda: math.inf,
        join_seconds: float = 0.0,
    ) -> None:
        self.stage = stage
        self._join_seconds = join_seconds
        self._ended_since: float | None = None
        self.attempts = Attempts(stage.dir.attempts)
        self.units = load_plan(stage)
        self.round = read_round(stage.dir)
        self.missing = {index for part in self.round.bins for index in part}
        self._ids = {unit.index: unit.id for unit in self.units}
        self._last_beat = last_beat
        self._ledger = Tail(stage.dir.ledger)
        self._watched: dict[str, tuple[float, float]] = {}
        self._gone: dict[str, float] = {}
        self._loading_since: dict[str, float] = {}
        self._reasons: Counter[str] = Counter()
        self._num_in = 0
        self._expected_in = sum(unit.size for unit in self.units)
        for commit in read_ledger(stage.dir, self.units).values():
            if commit.index not in self.missing:
                self._count(commit)

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
        for commit in iterate_ledger(self.stage.dir, self._ids, self._ledger):
            if commit.index in self.missing:
                self.missing.remove(commit.index)
                self._count(commit)
                new.append(commit)
        return new

    def _count(self, commit: Commit) -> None:
        self._reasons.update(commit.rejects)
        self._num_in += commit.num_in

    def check_rejects(self) -> None:
        """Raise FatalError if more is rejected than the configuration allows."""
        check_rejects(self.stage, self._expected_in, self._reasons, self._num_in)

    def has_ended(self) -> bool:
        """Return True if no rank can do anything more: each unit is committed or given up, or the stage is stopped."""
        if not self.missing or self.attempts.stopped() is not None:
            return True
        live = self.live_slots() if self.missing <= self.attempts.failed else None
        if live is None or not self._are_given_up(live):
            self._ended_since = None
            return False
        if self._are_given_up(live | {_ANOTHER_SLOT}):
            return True
        self._ended_since = time.monotonic() if self._ended_since is None else self._ended_since
        return time.monotonic() - self._ended_since >= self._join_seconds

    def _are_given_up(self, live: set[str]) -> bool:
        return all(self.attempts.is_given_up(index, live) for index in self.missing)

    def live_slots(self) -> set[str]:
        """Return the slots of the ranks that are alive, and have loaded what they need or may do so soon."""
        return {record.slot for record in read_progress(self.stage.dir.progress) if self._is_live(record)}

    def _is_live(self, record: RankProgress) -> bool:
        if self.is_dead(record.owner, record) or record.is_gone():
            return False
        # One that hangs while it loads is waited for by nobody.
        since = self._loading_since.setdefault(record.owner, time.monotonic())
        return record.ready or time.monotonic() - since < self.stage.lease_seconds

    def is_dead(self, owner: str, record: RankProgress | None) -> bool:
        """Return True if a rank has ended, or its heartbeat was the same for a lease by this process's clock.

        Args:
            owner: the id of its process.
            record: its heartbeat, None where there is none.
        """
        if record is not None and record.ended:
            return True
        now = time.monotonic()
        if record is not None and record.is_gone():
            # Its supervisor, if there is one, notes how it ended.
            return now - self._gone.setdefault(owner, now) >= _SECONDS_TO_NOTE_END
        beat = record.updated if record is not None else 0.0
        seen, since = self._watched.get(owner, (None, now))
        if beat != seen or now - self._last_beat() > _SHARE_WITHOUT_BEAT * self.stage.lease_seconds:
            since = now
        self._watched[owner] = (beat, since)
        return now - since >= self.stage.lease_seconds
