"""The leader of a stage: one process that reads what all ranks have noted, decides, and writes the state of the stage.

It is the driver where one runs, else a supervisor. Nobody has to be the leader: ranks go on with what they have, and
another takes over when the state has not been touched for a lease. Two leaders at once do no harm, since the ledger
alone says what is done; the one that the state names stays.
"""

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from uuid import uuid4

import msgspec

from sharmill.engine.attempts import Attempts, Claim, Note, is_among
from sharmill.engine.executor import Listener, StageResult
from sharmill.engine.fence import require_current
from sharmill.engine.launch import latest_claims, read_claim
from sharmill.engine.notes import StageNotes
from sharmill.engine.progress import BEATS_PER_LEASE, RankProgress, in_order
from sharmill.engine.rejects import check_rejects
from sharmill.engine.run_dir import StoredError, stored_fields
from sharmill.engine.stage import StageRun
from sharmill.engine.state import Offer, State, StateFile
from sharmill.engine.unit import Unit
from sharmill.errors import FatalError, SharmillError
from sharmill.files.atomic import temp_path, write_new
from sharmill.files.record_log import RecordLog
from sharmill.files.shared_disk import VisibilityTimeout

log = logging.getLogger(__name__)

# Supervisors that miss a leader come one after the other.
_SECONDS_APART = 0.1


def decide(
    attempts: Attempts,
    missing: Collection[int],
    claimed: Mapping[int, int],
    live: Collection[str],
    *,
    has_waited: bool = True,
) -> State:
    """Return the state that follows from what is known of a stage.

    Args:
        attempts: those that have ended.
        missing: the units that are not committed.
        claimed: the highest generation of the claims on units, of all that have been tried.
        live: the slots of ranks that are alive, and ready or soon so.
        has_waited: ranks that could do what is given up have had the time to come.
    """
    out = attempts.out()
    is_over = all(index in attempts.failed for index in missing) and are_given_up(attempts, missing, live)
    is_over = is_over and (has_waited or are_given_up(attempts, missing, {*live, "another host/rank"}))
    usable = {slot for slot in live if not is_among(slot, out)}
    offers: dict[int, Offer] = {}
    tried = [index for index in missing if 0 < attempts.generation(index) > claimed.get(index, 0)]
    for index in sorted(tried, key=lambda index: (len(attempts.failures(index)), index)):
        if not attempts.is_given_up(index, usable, out):
            slots = {note.slot for note in attempts.failures(index)}
            # Slots that have not tried it come first, where there are any.
            avoid = sorted(slots) if not usable <= slots else []
            offers[index] = Offer(generation=attempts.generation(index), avoid=avoid)
    return State(
        num_missing=len(missing),
        offers=offers,
        out=sorted(out),
        stopped=StoredError(**stored_fields(attempts.stopped)) if attempts.stopped is not None else None,
        ended=attempts.stopped is not None or is_over,
    )


def are_given_up(attempts: Attempts, missing: Collection[int], live: Collection[str]) -> bool:
    """Return True if no further attempt at any of these units is worth it."""
    out = attempts.out()
    return all(attempts.is_given_up(index, live, out) for index in missing)


class Leader:
    """One process as it follows a stage, tells a listener, and leads where nobody else does.

    Args:
        units: the missing units that the listener knows; it is told of no others.
        listener: of a driver; a supervisor has none, and reads what ranks have noted only while it leads.
        number: that of the supervisor's first rank; the lowest comes first where a leader is missing.

    Attributes:
        state: at the last look.
        given_up: sentences about places that the executor has given up, which no attempt has noted.
    """

    interval = 1.0

    def __init__(
        self, stage: StageRun, units: Sequence[Unit] = (), listener: Listener | None = None, *, number: int = 0
    ) -> None:
        self.stage = stage
        self.given_up: list[str] = []
        self.state = State()
        self._listener = listener
        self._units = {unit.index: unit for unit in units}
        self._id = uuid4().hex
        self._log = RecordLog(stage.ranks.log(self._id))
        self._file = StateFile(stage.ranks.state)
        self._notes: StageNotes | None = None
        self._patience = number * _SECONDS_APART
        # When the state was last seen to change, and which one that was.
        self._seen: tuple[tuple[int, int] | None, float] = (None, time.monotonic())
        self._looked = time.monotonic()
        self._written = -math.inf
        # The heartbeat of each rank, since when it has been the same, and when the first was seen.
        self._beats: dict[str, tuple[str, float, float]] = {}
        self._dead: set[str] = set()
        self._new_dead = False
        # Claims as they were listed last, and those that were read.
        self._claims_listed = self._looked
        self._claimed: dict[int, int] = {}
        self._claims: dict[tuple[int, int], Claim] = {}
        # Since when all that is missing is given up.
        self._over_since = math.inf

    @property
    def notes(self) -> StageNotes:
        """All that was noted by the last look of a process that leads or has a listener."""
        if self._notes is None:
            self._notes = StageNotes(self.stage, for_people=self._listener is not None)
        return self._notes

    @property
    def leads(self) -> bool:
        """Return True if this process has led at its last look."""
        return self.state.leader == self._id

    @property
    def ranks(self) -> list[RankProgress]:
        """The progress of all ranks, in their order."""
        return in_order(self.notes.ranks.values())

    @property
    def num_done(self) -> int:
        """The number of units that ranks have committed since this was made."""
        return len(self._units.keys() - self.notes.missing)

    @property
    def num_ready(self) -> int:
        """The number of ranks that have loaded what they need, and have not ended."""
        return sum(rank.ready > 0 and not rank.ended for rank in self.notes.ranks.values())

    def silent_ranks(self) -> list[int]:
        """Return the numbers of the ranks that are dead by their heartbeats alone, at the last look of a leader."""
        notes = self.notes
        silent = [owner for owner in self._dead if not notes.heartbeats[owner].has_ended]
        return sorted(notes.ranks[owner].rank for owner in silent if owner in notes.ranks)

    def look(self) -> bool:
        """Read what is new, report it, lead if it is to be, and return True if the stage has ended.

        Raises:
            FatalError: a user has cancelled the run.
            FileNotFoundError: the folders have gone with the plan.
        """
        found = self._file.read()
        if found.stopped is not None and found.stopped.code == "cancelled":
            raise found.stopped.as_error()
        self.state = found
        is_to_lead = self._is_to_lead(found)
        if self._listener is not None or is_to_lead:
            self._report()
        if is_to_lead:
            self._lead()
        return self.state.ended

    def tell(self, progress: RankProgress) -> None:
        """Take note of what a rank of this process has said of itself."""
        if self._listener is not None:
            self.notes.hear(progress)

    def wait(self, seconds: float) -> None:
        """Look at the stage, for a rank in this process that has nothing to do for so long at most."""
        if not self.look():
            time.sleep(min(seconds, 0.25))

    def close(self) -> None:
        """Leave the lead to others, if it was this process's."""
        with suppress(OSError, SharmillError):
            if self._file.read().leader == self._id and not self.state.ended:
                self._write(msgspec.structs.replace(self.state, leader=""))

    def outcome(self) -> StageResult:
        """Return how the work has ended, once no rank is left.

        Raises:
            SharmillError: an error has ended the stage, or no slot is left that could go on.
        """
        self.stage.run_dir.require_not_cancelled()
        paths = self.stage.dir
        with suppress(FileNotFoundError):  # what has gone with the plan
            self._report()
        if paths.done.exists() and paths.read_token() == self.stage.token:
            # Another process that is at work on it was faster.
            return StageResult()
        require_current(self.stage)
        # Other leaders may have noted something too, and seen more of what was done than can be seen here yet.
        notes = StageNotes(self.stage, for_people=False)

        def sees_all() -> bool:
            notes.look()
            return len(notes.missing) <= self.state.num_missing or not self.state.ended

        patience = VisibilityTimeout(self.stage.options.seconds_until_seen)
        patience.wait_until(sees_all, f"{self.stage.name}: what all ranks have noted")
        if notes.attempts.stopped is not None:
            raise notes.attempts.stopped
        if self.state.stopped is not None:
            raise self.state.stopped.as_error()
        out = notes.attempts.describe_out()
        if out and not are_given_up(notes.attempts, notes.missing, ()):
            raise notes.attempts.all_out_error(self.stage.name, paths.logs)
        failures = {index: notes.attempts.error(index) for index in sorted(notes.missing)}
        return StageResult(failures=failures, given_up=self.given_up or out)

    def _report(self) -> None:
        """Read the new notes of all ranks, and report them to the listener."""
        for commit in self.notes.look():
            if commit.index in self._units and self._listener is not None:
                self._listener.unit_done(self._units[commit.index], commit)
        if self._listener is not None:
            self._listener.looked(self.ranks)

    def _is_to_lead(self, found: State) -> bool:
        """Return True if this process is the leader, or the one that is there has given no heartbeat for a lease."""
        now = time.monotonic()
        if found.leader == self._id:
            return True
        if found.ended:
            return False
        if self._seen[0] != self._file.seen:
            self._seen = self._file.seen, now
        lease = self.stage.options.lease_seconds if found.leader else 0.0
        return now - self._seen[1] >= lease + self._patience

    def _lead(self) -> None:
        """Decide, and write the state.

        Raises:
            FatalError: a user has cancelled the run.
        """
        try:
            self.stage.run_dir.require_not_cancelled()
        except FatalError as error:
            self._write(State(leader=self._id, stopped=StoredError(**stored_fields(error)), ended=True))
            raise
        notes, now = self.notes, time.monotonic()
        attempts, missing = notes.attempts, notes.missing
        live = self._find_live(now)
        self._end_abandoned(now)
        if attempts.stopped is None:
            try:
                check_rejects(self.stage, notes.expected_in, notes.rejects, notes.num_in)
            except FatalError as error:
                self._note(Note(kind="stopped", slot="", launch=attempts.launch, **stored_fields(error)))
        is_over = bool(missing) and missing <= attempts.failed and are_given_up(attempts, missing, live)
        self._over_since = min(self._over_since, now) if is_over else math.inf
        has_waited = now - self._over_since >= notes.launch.join_seconds
        state = decide(attempts, missing, self._claimed, live, has_waited=has_waited)
        self._write(msgspec.structs.replace(state, leader=self._id))

    def _find_live(self, now: float) -> set[str]:
        """Return the slots of the ranks that are alive, and have loaded what they need or may do so soon."""
        notes, lease = self.notes, self.stage.options.lease_seconds
        if now - self._looked > 0.4 * lease:
            # What was not seen meanwhile says nothing.
            self._beats = {owner: (beat, now, first) for owner, (beat, _, first) in self._beats.items()}
        dead = {owner for owner in notes.heartbeats if self.is_dead(owner, now)}
        self._new_dead, self._dead = bool(dead - self._dead), dead
        # One that hangs while it loads is waited for by nobody.
        return {
            rank.slot
            for owner, rank in notes.ranks.items()
            if owner not in dead and (rank.ready or now - self._beats[owner][2] < lease)
        }

    def is_dead(self, owner: str, now: float) -> bool:
        """Return True if a rank has ended, or its heartbeat was the same for a lease by this process's clock."""
        heartbeat, lease = self.notes.heartbeats.get(owner), self.stage.options.lease_seconds
        beat = heartbeat.beat if heartbeat is not None else ""
        before, since, first = self._beats.get(owner, (beat, now, now))
        since = since if beat == before else now
        self._beats[owner] = beat, since, first
        if heartbeat is not None and heartbeat.has_ended:
            return True
        record = self.notes.ranks.get(owner)
        is_gone = record is not None and record.is_known_dead()
        # If the rank has a supervisor, that notes how it ended within a second.
        return now - since >= (min(lease, 3.0) if is_gone else lease)

    def _end_abandoned(self, now: float) -> None:
        """Note the end of attempts whose ranks are dead, where one has died, and once a lease.

        Claims are listed as well while a unit is to be tried again, to see whether a rank has it.
        """
        is_due = now - self._claims_listed >= self.stage.options.lease_seconds
        if not (is_due or self._new_dead or self.state.offers):
            return
        attempts, self._claims_listed = self.notes.attempts, now
        self._claimed = latest_claims(self.stage)
        # A rank that has ended by now may have committed since the last look.
        self._report()
        for unit in sorted(self.notes.missing & self._claimed.keys()):
            generation = self._claimed[unit]
            if generation < attempts.generation(unit):
                continue
            claim = self._claims.get((unit, generation)) or read_claim(self.stage, unit, generation)
            if claim.owner:
                self._claims[unit, generation] = claim
            # One that was never written has no owner.
            if self.is_dead(claim.owner or f"{unit}.{generation}", now):
                log.warning("unit %d is taken from rank %s, which has ended", unit, claim.owner)
                words = f"its rank on {claim.slot} ended in the middle of it, or gave no heartbeat any more"
                self._note(
                    Note(kind="failed", slot=claim.slot, launch=attempts.launch, owner=claim.owner, unit=unit,
                         generation=generation, message=words)
                )  # fmt: skip

    def _note(self, note: Note) -> None:
        self._log.append(note)
        self.notes.attempts.add(note)

    def _write(self, state: State) -> None:
        """Write the state where it has changed, and as a heartbeat; on a full disk it stays as it was."""
        self.state = state
        path, now = self.stage.ranks.state, time.monotonic()
        aside = temp_path(path)
        # Others need not read it for each unit that is done.
        is_same = state == msgspec.structs.replace(self._file.state, num_missing=state.num_missing)
        try:
            if not is_same or now - self._written >= self.stage.options.lease_seconds / BEATS_PER_LEASE:
                write_new(aside, msgspec.json.encode(state))
                aside.replace(path)
                self._written = now
            self._looked = now
        except FileNotFoundError:
            require_current(self.stage)
        except OSError as error:
            log.warning("the state of %s cannot be written: %s", self.stage.name, error)
            with suppress(OSError):
                aside.unlink(missing_ok=True)
