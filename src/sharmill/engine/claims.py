"""Claims: the right of one rank to one unit, as files that are created exclusively and never change.

The claim on a unit is the file ``<unit>.<generation>``, whose content names its owner; that of the highest generation
holds. Where an attempt has ended without a commit, a rank may create the next generation; the end of an attempt whose
rank has died, or whose heartbeat is stale, is noted by others. Of two that try, one succeeds, and neither can push a
newer owner out: that one has created a later name. A claim is no guard. A rank that was taken for dead may go on with
its unit; both bring the same bytes then.

A rank does the units of its own bin first, then those of the bin with most cost left (work stealing, Blumofe and
Leiserson 1999, doi:10.1145/324133.324234), then those whose attempts have failed, or were given back or left behind.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from uuid import uuid4

from sharmill.engine.attempts import Note, end_attempt
from sharmill.engine.fence import require_current
from sharmill.engine.progress import read_progress
from sharmill.engine.state import StageState
from sharmill.engine.unit import Unit
from sharmill.files.storage import stopping_errors
from sharmill.files.stored import RecordLog, read_stored

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.05
# To try units that others have claimed is work for the file system, and so is a list of all claims.
_LOSSES_BETWEEN_LISTINGS = 16


@dataclass(frozen=True)
class Rank:
    """A rank as it is started.

    Attributes:
        number: that of its bin and of its log; one beyond the bins has none of its own.
        slot: the host with the GPU or core, as ``host/gpu 0``.
        device: ``cpu`` or ``cuda``.
        owner: the random id of the process.
        job_seconds: the time limit of the job that it is in, None where there is none.
        is_replaced: a supervisor starts a fresh process where this one ends.
        beat_seconds: the time between two heartbeats at most; they are also what people see of its progress. A rank
            that waits for others looks three times as often.
    """

    number: int
    slot: str
    device: str
    owner: str = field(default_factory=lambda: uuid4().hex)
    job_seconds: float | None = None
    is_replaced: bool = True
    beat_seconds: float = 15.0


class Claims:
    """The units of a stage as one rank takes them: which is the next, and the claims on it.

    Args:
        state: what is known of the stage.
        rank: the rank that takes them.
        notes: those of its process.
    """

    def __init__(self, state: StageState, rank: Rank, notes: RecordLog) -> None:
        self._state = state
        self._rank = rank
        self._notes = notes
        self._folder = state.stage.dir.claims
        bins = state.round.bins
        self._own_bin = deque(bins[rank.number] if rank.number < len(bins) else ())
        # Units of each bin that nobody has claimed, as of the last listing, and their cost.
        self._free: list[list[int]] = []
        self._cost_left: list[float] = []
        self._num_losses = 0
        self._held: tuple[Unit, int] | None = None

    @property
    def expected(self) -> Unit | None:
        """The unit that will probably be next, since the rank holds its claim already."""
        return self._held[0] if self._held is not None else None

    def next(self) -> tuple[Unit, int] | None:
        """Return the next unit and the generation of its claim as soon as there is one, or None if nothing is left."""
        pause = _FIRST_PAUSE_SECONDS
        while not self.are_over():
            if (claim := self._take()) is not None:
                return claim
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

    def make(self, unit: int, generation: int) -> bool:
        """Claim a unit; return False if another rank has this generation of the claim."""
        path = self._folder / f"{unit}.{generation}"
        with stopping_errors(path):
            try:
                with path.open("xb") as stream:
                    stream.write(self._rank.owner.encode())
            except FileExistsError:
                # The server's answer may have been lost, and the client have asked it again.
                return read_stored(path) == self._rank.owner.encode()
        return True

    def _take(self) -> tuple[Unit, int] | None:
        """Claim a unit, and the one behind it as well as long as there are enough for all ranks."""
        held, self._held = self._held, None
        claim = held if held is not None and held[0].index in self._state.missing else self._claim()
        if claim is not None and self._state.stage.looks_ahead:
            self._held = self._claim_own() or self._steal(len(self._state.round.bins))
        return claim

    def _claim(self) -> tuple[Unit, int] | None:
        claim = self._claim_own() or self._steal() or self._claim_returned()
        if claim is None:
            self._end_abandoned()
            claim = self._claim_returned()
        return claim

    def _claim_own(self) -> tuple[Unit, int] | None:
        """Claim the next unit of this rank's bin that nobody has claimed."""
        while self._own_bin:
            if (claim := self._claim_fresh(self._own_bin.popleft())) is not None:
                return claim
        return None

    def _steal(self, least: int = 1) -> tuple[Unit, int] | None:
        """Claim the last unit of the bin with most cost left if nobody has claimed at least so many units."""
        if not any(self._free):
            self._list_free()
        while sum(map(len, self._free)) >= least:
            number = max(range(len(self._free)), key=lambda bin: (bool(self._free[bin]), self._cost_left[bin]))
            index = self._free[number].pop()
            self._cost_left[number] -= self._state.units[index].cost
            if (claim := self._claim_fresh(index)) is not None:
                return claim
            self._num_losses += 1
            if self._num_losses >= _LOSSES_BETWEEN_LISTINGS:
                self._list_free()
        return None

    def _list_free(self) -> None:
        attempts = self._state.attempts
        free = {index for index in self._state.missing - self._latest().keys() if attempts.generation(index) == 0}
        self._free = [[index for index in part if index in free] for part in self._state.round.bins]
        self._cost_left = [sum(self._state.units[index].cost for index in part) for part in self._free]
        self._num_losses = 0

    def _claim_fresh(self, index: int) -> tuple[Unit, int] | None:
        is_fresh = index in self._state.missing and self._state.attempts.generation(index) == 0
        return (self._state.units[index], 0) if is_fresh and self.make(index, 0) else None

    def _claim_returned(self) -> tuple[Unit, int] | None:
        """Claim a unit whose last attempt has failed or was given back, those that failed least often first."""
        attempts = self._state.attempts
        returned = [index for index in self._state.missing if attempts.is_returned(index)]
        live = self._state.live_slots() if returned else set[str]()
        for index in sorted(returned, key=lambda index: (len(attempts.failures(index)), index)):
            generation = attempts.generation(index)
            if self._may_try(index, live) and self.make(index, generation):
                return self._state.units[index], generation
        return None

    def _may_try(self, index: int, live: set[str]) -> bool:
        """Return True if an attempt in this slot tells more than those so far: others that have not tried come first.

        Args:
            live: the slots of all ranks that are alive.
        """
        attempts = self._state.attempts
        if attempts.is_given_up(index, live):
            return False
        tried = {note.slot for note in attempts.failures(index)}
        others = {slot for slot in live if not attempts.is_out(slot)}
        return self._rank.slot not in tried or others <= tried

    def _end_abandoned(self) -> None:
        """Note the end of attempts whose ranks have ended, or whose heartbeats were not seen for a lease."""
        state, attempts = self._state, self._state.attempts
        latest = self._latest()
        records = {record.owner: record for record in read_progress(state.stage.dir.progress)}
        # A rank that has ended by now may have committed since the last look.
        state.look()
        for index in sorted(state.missing & latest.keys()):
            generation = latest[index]
            # That of an attempt that has ended waits for whoever may try it.
            if generation < attempts.generation(index):
                continue
            try:
                owner = read_stored(self._folder / f"{index}.{generation}").decode("ascii", "replace")
            except FileNotFoundError:
                continue
            if owner == self._rank.owner or not state.is_dead(owner, records.get(owner)):
                continue
            log.warning("unit %d is taken from rank %s, which has ended", index, owner)
            open_attempts = {(note.unit, note.generation): note for note in attempts.open()}
            if (begun := open_attempts.get((index, generation))) is not None:
                message = f"its rank on {begun.slot} ended in the middle of it, or gave no heartbeat any more"
                end_attempt(self._notes, attempts, begun, "failed", message, message)
            else:
                claim = Note(kind="begun", slot=self._rank.slot, owner=owner, unit=index, generation=generation)
                end_attempt(self._notes, attempts, claim, "released", "its rank ended before it began")

    def _latest(self) -> dict[int, int]:
        """Return the highest generation of the claims on each unit."""
        found: dict[int, int] = {}
        for path in self._folder.iterdir():
            unit, _, generation = path.name.partition(".")
            if unit.isdecimal() and generation.isdecimal():
                found[int(unit)] = max(found.get(int(unit), 0), int(generation))
        return found
