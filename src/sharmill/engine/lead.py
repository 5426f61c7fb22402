"""The leader of a stage: one process that reads the notes of all ranks, decides, and writes the state of the stage.

The leader is the driver if there is one, otherwise a supervisor. Ranks keep working if the leader dies, and another
process takes over if the state file has not been touched for a lease. Two leaders at once do no harm, since only the
ledger decides which units are complete. A leader that the state does not name soon stops leading.
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

# Number of heartbeats of the leader per lease. Every process reads the state again after each heartbeat, so there
# should be few; but a shared disk may show a heartbeat up to a minute late.
_STATE_BEATS = 3


def decide(
    attempts: Attempts,
    missing: Collection[int],
    claimed: Mapping[int, int],
    live: Collection[str],
    *,
    has_waited: bool = True,
) -> State:
    """Return the state that follows from the attempts, the claims and the live ranks of a stage.

    Args:
        attempts: the finished attempts.
        missing: the units without a commit.
        claimed: the highest generation of the claims on each unit that was tried. For a unit without a claim in this
            launch, it is the first generation.
        live: the slots of live ranks that are ready or will be soon.
        has_waited: True if ranks on other hosts have had time to join. Until then, they may process units that would
            otherwise be given up.
    """
    excluded = attempts.excluded()
    is_over = all_given_up(attempts, missing, live if has_waited else {*live, "another host/rank"})
    usable = {slot for slot in live if not is_among(slot, excluded)}
    offers: dict[int, Offer] = {}
    tried = [
        index for index in attempts.tried if index in missing and attempts.generation(index) > claimed.get(index, 0)
    ]
    for index in sorted(tried, key=lambda index: (len(attempts.failures(index)), index)):
        if not attempts.is_given_up(index, usable, excluded):
            slots = {note.slot for note in attempts.failures(index)}
            # Prefer slots that have not tried the unit, if there are any.
            avoid = sorted(slots) if not usable <= slots else []
            offers[index] = Offer(generation=attempts.generation(index), avoid=avoid)
    return State(
        num_missing=len(missing),
        offers=offers,
        out=sorted(excluded),
        stopped=StoredError(**stored_fields(attempts.stopped)) if attempts.stopped is not None else None,
        ended=attempts.stopped is not None or is_over,
    )


def all_given_up(attempts: Attempts, missing: Collection[int], live: Collection[str]) -> bool:
    """Return True if no further attempt at any of these units is worthwhile."""
    # This quick check answers in most cases: a unit that has never failed is not given up.
    if not all(index in attempts.failed for index in missing):
        return False
    excluded = attempts.excluded()
    return all(attempts.is_given_up(index, live, excluded) for index in missing)


class Leader:
    """The leader of a stage; it reads the notes of all ranks, decides, and writes the state.

    Args:
        stage: the stage, with its current plan.
        notes: the notes of the ranks, as read by this process.
        id: the id by which the state names the leader.
        term: number of leaders so far, including this one.
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
        # For each rank: its last heartbeat, the time at which the heartbeat last changed, and the time at which the
        # rank was first seen.
        self._beats: dict[str, tuple[str, float, float]] = {}
        self._dead: set[str] = set()
        self._new_dead = False
        # The claims at the last listing, and the content of claims that were read.
        self._claims_listed = -math.inf
        self._claimed: dict[int, int] = dict(notes.launch.first)
        self._claims: dict[tuple[int, int], Claim] = {}
        # The first time at which all missing units were found to be given up; infinite if some may still be tried.
        self._over_since = math.inf

    def silent_ranks(self) -> list[int]:
        """Return the numbers of the ranks that stopped sending heartbeats without a note of their end."""
        notes = self.notes
        ended = {owner for owner, heartbeat in notes.heartbeats.items() if heartbeat.has_ended}
        return sorted(notes.ranks[owner].rank for owner in (self._dead - ended) & notes.ranks.keys())

    def lead(self, found: State) -> State:
        """Derive the state from the notes read last, write it if it has changed, and return it.

        Args:
            found: the state on disk.

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
        # While units are offered, list the claims more often, to see which of these units have been claimed.
        pause = self._lease / BEATS_PER_LEASE if found.offers else self._lease
        if self._new_dead or now - self._claims_listed >= pause:
            self._end_attempts_of_dead_ranks(now)
        if attempts.stopped is None:
            try:
                check_rejects(stage, notes.expected_in, notes.rejects, notes.num_in)
            except FatalError as error:
                self._note(Note(kind="stopped", slot="", launch=attempts.launch, **stored_fields(error)))
        is_over = bool(missing) and all_given_up(attempts, missing, live)
        self._over_since = min(self._over_since, now) if is_over else math.inf
        has_waited = now - self._over_since >= notes.launch.join_seconds or self._are_all_here()
        return self.write(decide(attempts, missing, self._claimed, live, has_waited=has_waited), found)

    def write(self, state: State, found: State, *, leads: bool = True) -> State:
        """Write the state if it has changed or a heartbeat is due. On a full disk, the file stays unchanged.

        Args:
            leads: True if this process stays the leader; otherwise another process may become the leader at once.

        Raises:
            FatalError: the end of the stage cannot be written.
        """
        state = msgspec.structs.replace(state, leader=self.id if leads else "", term=self.term)
        path, now = self._stage.ranks.state, time.monotonic()
        temporary = temp_path(path)
        # If only the number of missing units has changed, wait for the next heartbeat, so that other processes need not
        # read the state for each unit.
        is_same = state == msgspec.structs.replace(found, num_missing=state.num_missing)
        try:
            if not is_same or now - self._written >= self._lease / _STATE_BEATS:
                write_new(temporary, msgspec.json.encode(state))
                temporary.replace(path)
                self._written = now
            self._looked = now
        except FileNotFoundError:
            require_current(self._stage)
        except OSError as error:
            log.warning("the state of %s cannot be written: %s", self._stage.name, error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if state.ended:
                # Raise, because ranks would wait forever for the end of the stage.
                with stopping_errors(path):
                    raise
        return state

    def _find_live(self, now: float) -> set[str]:
        """Return the slots of the live ranks that are ready, or still loading within the first lease."""
        notes, lease = self.notes, self._lease
        if now - self._looked > 0.4 * lease:
            # This process has not looked for a while, so heartbeats may have changed unseen: restart the clocks.
            self._beats = {owner: (beat, now, first) for owner, (beat, _, first) in self._beats.items()}
        # ``ranks`` also has ranks of this process whose first heartbeat could not be written.
        dead = {owner for owner in notes.heartbeats.keys() | notes.ranks.keys() if self.is_dead(owner, now)}
        self._new_dead, self._dead = bool(dead - self._dead), dead
        # Do not count on a rank that is still loading after a lease, since it may hang.
        return {
            rank.slot
            for owner, rank in notes.ranks.items()
            if owner not in dead and (rank.ready or now - self._beats[owner][2] < lease)
        }

    def _are_all_here(self) -> bool:
        """Return True if all started ranks are alive. A rank that is not alive may be requeued on another host."""
        here = {rank.rank for owner, rank in self.notes.ranks.items() if owner not in self._dead}
        return here.issuperset(range(len(self.notes.launch.bins)))

    def is_dead(self, owner: str, now: float) -> bool:
        """Return True if a rank has ended, or its heartbeat has not changed for a lease by this process's clock."""
        heartbeat, lease = self.notes.heartbeats.get(owner), self._lease
        beat = heartbeat.beat if heartbeat is not None else ""
        before, since, first = self._beats.get(owner, (beat, now, now))
        since = since if beat == before else now
        self._beats[owner] = beat, since, first
        if heartbeat is not None and heartbeat.has_ended:
            return True
        record = self.notes.ranks.get(owner)
        is_gone = record is not None and record.is_known_dead()
        # Even if the process is gone, give its supervisor a few seconds to note how it ended.
        return now - since >= (min(lease, 3.0) if is_gone else lease)

    def _end_attempts_of_dead_ranks(self, now: float) -> None:
        """List the claims, and note the failure of attempts whose ranks are dead."""
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
            # A claim without an owner was created but never written; use its name instead of the owner.
            if self.is_dead(claim.owner or f"{unit}.{generation}", now):
                log.warning("unit %d is released, because its rank %s is dead", unit, claim.owner)
                words = f"the rank on {claim.slot} died or stopped sending heartbeats"
                self._note(
                    Note(kind="failed", slot=claim.slot, launch=attempts.launch, owner=claim.owner, unit=unit,
                         generation=generation, message=words)
                )  # fmt: skip

    def _note(self, note: Note) -> None:
        self._log.append(note)
        self.notes.attempts.add(note)
