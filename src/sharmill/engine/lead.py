"""The leader of a stage: one process that reads what all ranks have noted, decides, and writes the state of the stage.

It is the driver where one runs, else a supervisor. Nobody has to be the leader: ranks go on with what they have, and
another takes over when the state has not been touched for a lease. Two leaders at once do no harm, since the ledger
alone says what is done; the one that the state names stays.
"""

import logging
import math
import time
from collections.abc import Collection, Mapping
from contextlib import suppress

import msgspec

from sharmill.engine.attempts import Attempts, Claim, Note, is_among
from sharmill.engine.fence import require_current
from sharmill.engine.launch import latest_claims, read_claim
from sharmill.engine.notes import StageNotes
from sharmill.engine.progress import BEATS_PER_LEASE
from sharmill.engine.rejects import check_rejects
from sharmill.engine.run_dir import StoredError, stored_fields
from sharmill.engine.stage import StageRun
from sharmill.engine.state import Offer, State
from sharmill.errors import FatalError
from sharmill.files.atomic import temp_path, write_new
from sharmill.files.disk import stopping_errors
from sharmill.files.record_log import RecordLog

log = logging.getLogger(__name__)

# In a lease. Each is one more reading of the state by all; a shared disk may show it a minute late.
_STATE_BEATS = 3


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
        claimed: the highest generation of the claims on units that have been tried; one that nobody has claimed in
            this launch has its first.
        live: the slots of ranks that are alive, and ready or soon so.
        has_waited: ranks that could do what is given up have had the time to come.
    """
    out = attempts.out()
    is_over = are_given_up(attempts, missing, live if has_waited else {*live, "another host/rank"})
    usable = {slot for slot in live if not is_among(slot, out)}
    offers: dict[int, Offer] = {}
    tried = [
        index for index in attempts.tried if index in missing and attempts.generation(index) > claimed.get(index, 0)
    ]
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
    # One that has never failed tells at once, as long as there is any.
    if not all(index in attempts.failed for index in missing):
        return False
    out = attempts.out()
    return all(attempts.is_given_up(index, live, out) for index in missing)


class Leader:
    """Reads what all ranks have noted, decides, and writes the state.

    Args:
        stage: its plan is the present one.
        notes: of its ranks, as this process has read them.
        id: by which the state names it.
        term: how many leaders there were.
    """

    def __init__(self, stage: StageRun, notes: StageNotes, id: str, term: int) -> None:
        self.id = id
        self.term = term
        self.notes = notes
        self._stage = stage
        self._lease = stage.options.lease_seconds
        self._log = RecordLog(stage.ranks.log(self.id))
        self._looked = time.monotonic()
        self._written = -math.inf
        # The heartbeat of each rank, since when it has been the same, and when the first was seen.
        self._beats: dict[str, tuple[str, float, float]] = {}
        self._dead: set[str] = set()
        self._new_dead = False
        # Claims as they were listed last, and those that were read.
        self._claims_listed = -math.inf
        self._claimed: dict[int, int] = dict(notes.launch.first)
        self._claims: dict[tuple[int, int], Claim] = {}
        # Since when all that is missing is given up.
        self._over_since = math.inf

    def silent_ranks(self) -> list[int]:
        """Return the numbers of the ranks that are dead by their heartbeats alone, at the last look of a leader."""
        notes = self.notes
        ended = {owner for owner, heartbeat in notes.heartbeats.items() if heartbeat.has_ended}
        return sorted(notes.ranks[owner].rank for owner in (self._dead - ended) & notes.ranks.keys())

    def lead(self, found: State) -> State:
        """Decide by the notes as they were read last, and return the state, which is written where it has changed.

        Args:
            found: the state that is there.

        Raises:
            FatalError: a user has cancelled the run.
        """
        stage, notes, now = self._stage, self.notes, time.monotonic()
        try:
            stage.run_dir.require_not_cancelled()
        except FatalError as error:
            with suppress(FatalError):
                self.write(State(stopped=StoredError(**stored_fields(error)), ended=True), found)
            raise
        attempts, missing = notes.attempts, notes.missing
        live = self._find_live(now)
        # They are listed as well to see whether a rank has what is to be tried again.
        pause = self._lease / BEATS_PER_LEASE if found.offers else self._lease
        if self._new_dead or now - self._claims_listed >= pause:
            self._end_abandoned(now)
        if attempts.stopped is None:
            try:
                check_rejects(stage, notes.expected_in, notes.rejects, notes.num_in)
            except FatalError as error:
                self._note(Note(kind="stopped", slot="", launch=attempts.launch, **stored_fields(error)))
        is_over = bool(missing) and are_given_up(attempts, missing, live)
        self._over_since = min(self._over_since, now) if is_over else math.inf
        has_waited = now - self._over_since >= notes.launch.join_seconds or self._are_all_here()
        return self.write(decide(attempts, missing, self._claimed, live, has_waited=has_waited), found)

    def write(self, state: State, found: State, *, leads: bool = True) -> State:
        """Write the state where it has changed, and as a heartbeat; on a full disk it stays as it was.

        Args:
            leads: this process goes on to lead; else others may at once.

        Raises:
            FatalError: the end of the stage cannot be written.
        """
        state = msgspec.structs.replace(state, leader=self.id if leads else "", term=self.term)
        path, now = self._stage.ranks.state, time.monotonic()
        aside = temp_path(path)
        # Others need not read it for each unit that is done.
        is_same = state == msgspec.structs.replace(found, num_missing=state.num_missing)
        try:
            if not is_same or now - self._written >= self._lease / _STATE_BEATS:
                write_new(aside, msgspec.json.encode(state))
                aside.replace(path)
                self._written = now
            self._looked = now
        except FileNotFoundError:
            require_current(self._stage)
        except OSError as error:
            log.warning("the state of %s cannot be written: %s", self._stage.name, error)
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            if state.ended:
                # Without it, ranks would wait for ever.
                with stopping_errors(path):
                    raise
        return state

    def _find_live(self, now: float) -> set[str]:
        """Return the slots of the ranks that are alive, and have loaded what they need or may do so soon."""
        notes, lease = self.notes, self._lease
        if now - self._looked > 0.4 * lease:
            # What was not seen meanwhile says nothing.
            self._beats = {owner: (beat, now, first) for owner, (beat, _, first) in self._beats.items()}
        # One whose first heartbeat could not be written has told this process of itself.
        dead = {owner for owner in notes.heartbeats.keys() | notes.ranks.keys() if self.is_dead(owner, now)}
        self._new_dead, self._dead = bool(dead - self._dead), dead
        # One that hangs while it loads is waited for by nobody.
        return {
            rank.slot
            for owner, rank in notes.ranks.items()
            if owner not in dead and (rank.ready or now - self._beats[owner][2] < lease)
        }

    def _are_all_here(self) -> bool:
        """Return True if each rank that was started is alive: one in a bad slot may be requeued, on a good host."""
        here = {rank.rank for owner, rank in self.notes.ranks.items() if owner not in self._dead}
        return here.issuperset(range(len(self.notes.launch.bins)))

    def is_dead(self, owner: str, now: float) -> bool:
        """Return True if a rank has ended, or its heartbeat was the same for a lease by this process's clock."""
        heartbeat, lease = self.notes.heartbeats.get(owner), self._lease
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
        """List the claims, and note the end of attempts whose ranks are dead."""
        attempts, self._claims_listed = self.notes.attempts, now
        claimed = latest_claims(self._stage)
        self._claimed = self.notes.launch.first | claimed
        for unit in sorted(self.notes.missing & claimed.keys()):
            generation = claimed[unit]
            if generation < attempts.generation(unit):
                continue
            claim = self._claims.get((unit, generation)) or read_claim(self._stage, f"{unit}.{generation}")
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
