"""The loop of a rank, the same for every executor: claim a unit, attempt it, commit it, until none is left.

A rank does the units of its own bin first, then those of the bin with most cost left (work stealing, Blumofe and
Leiserson 1999, doi:10.1145/324133.324234), then those that other ranks have given back, failed with, or left behind
when they died. It ends when the stage has ended: each unit is committed or given up, or an error ends it for all.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from uuid import uuid4

import msgspec

from sharmill.engine.attempts import FINAL_CODES, AttemptLog, Attempts, Note, NoteKind
from sharmill.engine.claims import Claims
from sharmill.engine.fence import require_current
from sharmill.engine.late_views import wait_for_plan
from sharmill.engine.outcomes import BrokenDevice, Overtaken
from sharmill.engine.patience import Patience
from sharmill.engine.progress import ProgressWriter, read_progress
from sharmill.engine.stage import Stage
from sharmill.engine.state import StageState
from sharmill.engine.unit import Commit, Unit
from sharmill.engine.worker import Worker
from sharmill.errors import DeviceError, SharmillError

log = logging.getLogger(__name__)

_BEATS_PER_LEASE = 8
_FIRST_PAUSE_SECONDS = 0.05
# A rank whose units fail one after the other may itself be what is broken, as after an error on its GPU.
_FAILURES_IN_A_ROW = 2
# Codes of errors that may be those of one slot alone; a full disk is one only if it is that of the node.
_OF_SLOT = FINAL_CODES - {"disk"} | {"setup_failed"}
_TRIES_BETWEEN_LISTINGS = 16
# A unit that a rank was told to leave counts as failed if it had more than this of the time that any unit can have.
_MOST_OF_THE_TIME = 0.5


@dataclass(frozen=True)
class Rank:
    """A rank as it is started.

    Attributes:
        number: that of its bin and of its log; one beyond the bins has none of its own.
        slot: the host with the GPU or core, as ``host/gpu 0``.
        device: ``cpu`` or ``cuda``.
        owner: the random id of the process.
        job_seconds: the time limit of the job that it is in, None where there is none.
        join_seconds: as that of ``StageState``.
        is_replaced: a supervisor starts a fresh process where this one ends.
        beat_seconds: the time between two heartbeats at most; they are also what people see of its progress. A rank
            that waits for others looks three times as often.
    """

    number: int
    slot: str
    device: str
    owner: str = ""
    job_seconds: float | None = None
    join_seconds: float = 0.0
    is_replaced: bool = True
    beat_seconds: float = 15.0


class Replace(Exception):
    """The end of a rank in whose place a fresh process is to go on."""


def work(stage: Stage, rank: Rank, on_change: Callable[[], object] = lambda: None) -> None:
    """Do units of a stage until it has ended, or until this slot is taken out of work.

    Args:
        on_change: is called about once a second in the middle of a unit, and after each.

    Raises:
        Replace: a fresh process is to go on.
        SharmillError: this rank can do nothing; others are told where that holds for them too.
    """
    patience = Patience(stage.seconds_until_seen)
    wait_for_plan(stage, patience)
    require_current(stage)
    owner = rank.owner or uuid4().hex
    notes = AttemptLog(stage.dir.attempts)
    interval = min(rank.beat_seconds, stage.lease_seconds / _BEATS_PER_LEASE)
    with ProgressWriter(stage.dir.rank_progress(owner), rank.number, rank.slot, owner, interval) as progress:
        # The files in a folder may be seen later than the folder.
        state = patience.once_seen(
            lambda: StageState(stage, lambda: progress.last_beat, join_seconds=rank.join_seconds)
        )
        units = Units(state, rank, owner, notes)
        if not units.has_work():
            return
        try:
            with Worker(
                stage, rank.number, rank.device, progress, lambda unit, done: on_change(), state.is_missing
            ) as worker:
                progress.be_ready()
                attempter = _Attempter(rank, owner, worker, state, notes)
                while (taken := units.next()) is not None:
                    attempter.attempt(*taken)
                    on_change()
                    if attempter.needs_replacing and rank.is_replaced:
                        log.warning("rank %d makes way for a fresh process", rank.number)
                        raise Replace
        except FileNotFoundError:
            # The folders have gone with the plan.
            require_current(stage)
            raise
        except SharmillError as error:
            require_current(stage)
            if error.code != "superseded_plan":
                _note_error(rank, notes, error)
            raise


@dataclass
class _Attempter:
    """Attempts of one rank at units, with the notes of their begin and their end."""

    rank: Rank
    owner: str
    worker: Worker
    state: StageState
    notes: AttemptLog
    needs_replacing: bool = False
    failures_in_a_row: int = 0

    def attempt(self, unit: Unit, generation: int, following: Unit | None) -> None:
        """Try a unit once.

        Raises:
            SharmillError: the rank cannot go on.
        """
        note = Note(kind="begun", slot=self.rank.slot, owner=self.owner, unit=unit.index, generation=generation)
        self.notes.add(note)
        self.state.attempts.add(note)
        began = time.monotonic()
        try:
            outcome = self.worker.run(unit, following)
        except KeyboardInterrupt:
            spent = time.monotonic() - began
            kind: NoteKind = "failed" if was_most_of_job(spent, self.rank.job_seconds) else "released"
            self._end(note, kind, f"its rank had to leave after {spent:.0f} s")
            raise
        except SharmillError as error:
            # The unit is not to blame. On a disk that takes no note, the error of the work is to be told.
            with suppress(SharmillError):
                self._end(note, "released", str(error))
            raise
        if isinstance(outcome, Commit):
            self.failures_in_a_row = 0
            self._end(note, "done")
        elif isinstance(outcome, Overtaken):
            self._end(note, "released", outcome.message)
        else:
            self.failures_in_a_row += 1
            self._end(note, "failed", outcome.message, outcome.traceback)
        is_broken = isinstance(outcome, BrokenDevice)
        self.needs_replacing = is_broken or self.failures_in_a_row >= _FAILURES_IN_A_ROW

    def _end(self, begun: Note, kind: NoteKind, message: str = "", traceback: str = "") -> None:
        end_attempt(self.notes, self.state.attempts, begun, kind, message, traceback)


def was_most_of_job(seconds: float, job_seconds: float | None) -> bool:
    """Return True if a unit had most of the time that any unit can have in a job, and did not end."""
    return job_seconds is not None and seconds > _MOST_OF_THE_TIME * job_seconds


def end_attempt(
    notes: AttemptLog, attempts: Attempts, begun: Note, kind: NoteKind, message: str = "", traceback: str = ""
) -> None:
    """Note how an attempt has ended, where all ranks see it."""
    note = msgspec.structs.replace(begun, kind=kind, message=message, traceback=traceback)
    with suppress(FileNotFoundError):  # the folder may have gone with the plan
        notes.add(note)
    attempts.add(note)


def _note_error(rank: Rank, notes: AttemptLog, error: SharmillError) -> None:
    """Note why a rank ends: what ends the stage for all, or what is wrong with its slot alone."""
    of_slot = isinstance(error, DeviceError) or error.code in _OF_SLOT
    try:
        if of_slot:
            place = error.place if isinstance(error, DeviceError) else ""
            notes.add(Note(kind="failed", slot=rank.slot, message=str(error), code=error.code, place=place))
        else:
            notes.stop(error)
    except SharmillError as failed:
        if rank.is_replaced:
            # For the supervisor this is not the end of a rank that has noted why.
            raise OSError(f"the end of the rank cannot be noted: {failed}") from failed
        log.warning("%s", failed)


class Taken(NamedTuple):
    """A unit that a rank has claimed, the generation of the claim, and the unit that follows if that is known."""

    unit: Unit
    generation: int
    following: Unit | None


class Units:
    """The units of a stage as one rank takes them: which is the next, and the claims on it.

    Args:
        state: what is known of the stage.
        rank: the rank that takes them.
        owner: the random id of its process.
        notes: those of its process.
    """

    def __init__(self, state: StageState, rank: Rank, owner: str, notes: AttemptLog) -> None:
        self._state = state
        self._rank = rank
        self._owner = owner
        self._notes = notes
        self._claims = Claims(state.stage.dir.claims, owner)
        # Those of which no claim is known, by bin.
        self._fresh = [deque(part) for part in state.round.bins]
        self._cost_left = [0.0] * len(self._fresh)
        self._tries_in_vain = _TRIES_BETWEEN_LISTINGS
        self._ahead: tuple[Unit, int] | None = None

    def has_work(self) -> bool:
        """Return True if a rank could find something to do, so that its model is worth loading."""
        self._state.look()
        return not self._state.has_ended() and not self._state.attempts.is_out(self._rank.slot)

    def next(self) -> Taken | None:
        """Return the next unit as soon as there is one, or None when nothing is left for this rank."""
        pause = _FIRST_PAUSE_SECONDS
        while not self.are_over():
            if (taken := self.take()) is not None:
                return taken
            require_current(self._state.stage)
            time.sleep(pause)
            pause = min(2 * pause, self._rank.beat_seconds / 3)
        return None

    def are_over(self) -> bool:
        """Return True if nothing is left for this rank: the stage has ended, or its slot is taken out of work.

        Raises:
            FatalError: more is rejected than the configuration allows.
        """
        self._state.look()
        self._state.check_rejects()
        if self._state.attempts.is_out(self._rank.slot):
            log.error("rank %d: %s is taken out of work", self._rank.number, self._rank.slot)
            return True
        return self._state.has_ended()

    def take(self) -> Taken | None:
        """Claim a unit; None if no unit can be claimed now."""
        while True:
            claimed, self._ahead = self._ahead or self._claim(), None
            if claimed is None:
                return None
            if claimed[0].index in self._state.missing:
                # While there are enough units for all ranks, each may hold its next one already.
                enough = len(self._fresh) if len(self._fresh) > 1 else 0
                if self._state.stage.looks_ahead and sum(map(len, self._fresh)) > enough:
                    self._ahead = self._claim_fresh()
                return Taken(*claimed, self._ahead[0] if self._ahead else None)

    def _claim(self) -> tuple[Unit, int] | None:
        return self._claim_fresh() or self._claim_returned() or self._take_over()

    def _claim_fresh(self) -> tuple[Unit, int] | None:
        """Claim a unit that nobody has claimed: the next of this rank's bin, else the last of the fullest one."""
        number = self._rank.number
        while number < len(self._fresh) and self._fresh[number]:
            if (claim := self._try_fresh(number, self._fresh[number].popleft())) is not None:
                return claim
        while any(self._fresh):
            if self._tries_in_vain >= _TRIES_BETWEEN_LISTINGS:
                self._forget_claimed()
                self._tries_in_vain = 0
            number = max(range(len(self._fresh)), key=lambda bin: (bool(self._fresh[bin]), self._cost_left[bin]))
            if self._fresh[number] and (claim := self._try_fresh(number, self._fresh[number].pop())) is not None:
                return claim
            self._tries_in_vain += 1
        return None

    def _try_fresh(self, bin: int, index: int) -> tuple[Unit, int] | None:
        unit = self._state.units[index]
        self._cost_left[bin] -= unit.cost
        if index in self._state.missing and self._state.attempts.generation(index) == 0 and self._claims.make(index, 0):
            return unit, 0
        return None

    def _forget_claimed(self) -> None:
        """Leave out the units that others have claimed: to try one after the other is work for the file system."""
        latest = self._claims.latest()
        self._fresh = [deque(index for index in part if index not in latest) for part in self._fresh]
        self._cost_left = [sum(self._state.units[index].cost for index in part) for part in self._fresh]

    def _claim_returned(self) -> tuple[Unit, int] | None:
        """Claim a unit whose last attempt has failed or was given back, those that failed least often first."""
        attempts = self._state.attempts
        returned = attempts.returned & self._state.missing
        live = self._state.live_slots() if returned else set[str]()
        for index in sorted(returned, key=lambda index: (attempts.num_failures(index), index)):
            generation = attempts.generation(index)
            if self._may_try(index, live) and self._claims.make(index, generation):
                return self._state.units[index], generation
        return None

    def _may_try(self, index: int, live: set[str]) -> bool:
        """Return True if an attempt in this slot tells more than those so far: others that have not tried come first.

        Args:
            live: the slots of all ranks that are alive.
        """
        attempts, slot = self._state.attempts, self._rank.slot
        if attempts.is_given_up(index, live):
            return False
        others = {other for other in live if not attempts.is_out(other)} - {slot}
        return not attempts.has_failed_in(index, slot) or all(attempts.has_failed_in(index, one) for one in others)

    def _take_over(self) -> tuple[Unit, int] | None:
        """Claim a unit whose owner has ended, or whose heartbeat was not seen for a lease."""
        state, attempts = self._state, self._state.attempts
        latest = self._claims.latest()
        records = {record.owner: record for record in read_progress(state.stage.dir.progress)}
        # A rank that has ended by now may have committed since the last look.
        state.look()
        for index in sorted(state.missing & latest.keys()):
            generation = latest[index]
            if generation < attempts.generation(index):
                continue  # it waits for whoever may try it
            owner = self._claims.owner(index, generation)
            if owner is None or owner == self._owner or not state.is_dead(owner, records.get(owner)):
                continue
            if not self._claims.make(index, generation + 1):
                continue
            log.warning("unit %d is taken over from rank %s, which has ended", index, owner)
            if (begun := attempts.begun(index, generation)) is not None:
                message = f"its rank on {begun.slot} ended in the middle of it, or gave no heartbeat any more"
                end_attempt(self._notes, attempts, begun, "failed", message, message)
            if self._may_try(index, state.live_slots()):
                return state.units[index], generation + 1
            claim = Note(kind="begun", slot=self._rank.slot, unit=index, generation=generation + 1)
            end_attempt(self._notes, attempts, claim, "released", "it is left to another slot")
        return None
