"""Attempts at units: the notes about them, and the decisions to exclude slots and to give up units.

A slot is a place for one rank: a GPU or a core of a host. An attempt begins with a claim on the unit and ends with a
commit, or with a note that names the slot. A failed attempt counts against the unit only if the slot has completed
another unit; otherwise the slot may be to blame. A slot is excluded if several units fail on it and another slot has
completed one of them, or if many units fail on it and none succeeds. A bad slot or host therefore costs no unit that a
good one can process, and a bad unit is given up after a few attempts.
"""

import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import msgspec

from sharmill.engine.run_dir import StoredError
from sharmill.engine.unit import Commit, FailedAttempt
from sharmill.errors import FatalError, SharmillError

# A unit is given up after at least this many failures. A slot is excluded if this many units have failed on it and one
# of them has been completed elsewhere.
MAX_FAILURES = 3
# The unit number in notes about the set-up of a rank.
SETUP = -1
# Codes of errors that would recur in the same slot.
FINAL_CODES = frozenset({"disk", "missing_package", "other_device", "out_of_memory", "unlike_nodes"})
# After a unit has been released this many times, for instance by preemption, its next release counts as a failure.
_MAX_RELEASES = 10


class Claim(msgspec.Struct, kw_only=True):
    """The content of a claim on a unit.

    Attributes:
        owner: the id of the rank's process.
        slot: the slot of the rank.
        time: Unix time of the claim by the clock of the slot's host.
    """

    owner: str = ""
    slot: str = ""
    time: float = msgspec.field(default_factory=time.time)


NoteKind = Literal["failed", "released", "stopped"]


class Note(StoredError, tag="note", tag_field="type", kw_only=True, omit_defaults=True):
    """A note about an attempt that ended without a commit, a failed set-up of a rank, or an error that stops the stage.

    Attributes:
        kind: ``failed`` or ``released`` for an attempt or a set-up, ``stopped`` for an error that stops the stage.
        slot: the slot of the rank.
        launch: the id of the launch; the note counts for this launch only.
        owner: the id of the rank's process.
        unit: the index of the unit, ``SETUP`` for the set-up of a rank.
        generation: the generation of the rank's claim on the unit.
        time: Unix time of the note by the clock of the slot's host.
        traceback: the traceback of the error, "" if there is none.
    """

    kind: NoteKind
    slot: str
    launch: str
    owner: str = ""
    unit: int = SETUP
    generation: int = 0
    time: float = msgspec.field(default_factory=time.time)
    traceback: str = ""


class Attempts:
    """The finished attempts at the units of a stage in one launch.

    Attributes:
        stopped: the error that ends the stage for all ranks, None if there is none.
        tried: the units with an attempt that has ended without a commit.
        failed: the units with a failed attempt.
        num_ended: number of attempts that have ended.
    """

    def __init__(self, launch: str) -> None:
        self.launch = launch
        self.stopped: SharmillError | None = None
        self.failed: set[int] = set()
        self.num_ended = 0
        # For each attempt that has ended without a commit, its note, by unit and by generation of the claim.
        self._units: dict[int, dict[int, Note]] = {}
        self.tried = self._units.keys()
        self._committed: set[int] = set()
        # For each slot, the time of its last commit, and the notes of its failures.
        self._done: dict[str, float] = {}
        self._failures: dict[str, list[Note]] = {}

    def add(self, record: Note | Commit) -> None:
        """Take a record from a log into account; records of other launches are ignored."""
        if record.launch != self.launch:
            return
        if isinstance(record, Commit):
            self._committed.add(record.index)
            self.num_ended += 1
            self._done[record.slot] = max(record.time, self._done.get(record.slot, 0.0))
        elif record.kind == "stopped":
            self.stopped = record.as_error()
        else:
            self._end(record)

    def _end(self, note: Note) -> None:
        if note.unit != SETUP:
            ended = self._units.setdefault(note.unit, {})
            if note.generation in ended:
                # Two notes about the same end may exist: one from the rank, and one from its supervisor or the leader.
                return
            released = sum(before.kind == "released" for before in ended.values())
            if note.kind == "released" and released >= _MAX_RELEASES:
                note = msgspec.structs.replace(note, kind="failed")
            ended[note.generation] = note
            self.num_ended += 1
        if note.kind == "failed":
            if note.unit != SETUP:
                self.failed.add(note.unit)
            self._failures.setdefault(note.slot, []).append(note)

    def generation(self, unit: int) -> int:
        """Return the generation of the next claim on a unit: 0, or the last ended attempt's generation plus one."""
        return max(self._units.get(unit, ()), default=-1) + 1

    def has_ended(self, unit: int, generation: int) -> bool:
        """Return True if a note says that this attempt has ended."""
        return generation in self._units.get(unit, ())

    def failures(self, unit: int) -> list[Note]:
        """Return the notes of all failed attempts at a unit, in the order of the attempts."""
        return [note for _, note in sorted(self._units.get(unit, {}).items()) if note.kind == "failed"]

    def error(self, unit: int) -> FailedAttempt:
        """Return the error of the last failed attempt at a unit, or a general message if there is none."""
        gone = "its ranks ended before it was complete"
        if not (failures := self.failures(unit)):
            return FailedAttempt(unit, gone, gone)
        return FailedAttempt(unit, failures[-1].message, failures[-1].traceback or failures[-1].message)

    def excluded(self) -> set[str]:
        """Return the excluded slots and hosts.

        A host is excluded if several of its slots are excluded and none of its other slots has completed a unit, but a
        slot of another host has.
        """
        bad = set(self.excluded_slots())
        useful = {host_of(slot) for slot in self._done if slot not in bad}
        hosts = Counter(map(host_of, bad))
        bad_hosts = {host for host, number in hosts.items() if number >= MAX_FAILURES and host not in useful}
        return bad | (bad_hosts if useful else set())

    def excluded_slots(self) -> dict[str, Note]:
        """Return the slots that are excluded because of their own failures, each with the note on its last failure."""
        return {slot: self._since(slot)[-1] for slot in sorted(self._failures) if self._is_bad(slot)}

    def error_of_all(self, num_ranks: int) -> SharmillError | None:
        """Return the common error if at least ``num_ranks`` slots are excluded for set-up errors with the same code.

        Return None otherwise, or if any unit is complete. Also return None if all these slots are on one host, because
        the host itself may be bad.
        """
        last = list(self.excluded_slots().values())
        kinds, hosts = {(note.unit, note.code) for note in last}, {host_of(note.slot) for note in last}
        are_enough = len(last) >= num_ranks and len(hosts) > 1
        if self._done or not are_enough or len(kinds) > 1 or last[0].unit != SETUP or not last[0].code:
            return None
        return last[0].as_error()

    def _since(self, slot: str) -> list[Note]:
        """Return the notes of a slot's failures since its last commit, in order of time."""
        done = self._done.get(slot, 0.0)
        return sorted((note for note in self._failures.get(slot, ()) if note.time >= done), key=lambda note: note.time)

    def _is_bad(self, slot: str) -> bool:
        """Return True if a slot is to blame for its failures.

        It is to blame if its set-up has failed several times, or has failed with an error that would recur. It is also
        to blame if several units have failed on it and one of them has been completed, or if many have failed and it
        has completed none.
        """
        failed = self._since(slot)
        setups = [note for note in failed if note.unit == SETUP]
        if len(setups) >= MAX_FAILURES or any(note.code in FINAL_CODES for note in setups):
            return True
        units = {note.unit for note in failed} - {SETUP}
        if len(units) < MAX_FAILURES:
            return False
        # If none of these units has been completed, the units may be to blame, unless there are many of them.
        return bool(units & self._committed) or (slot not in self._done and len(units) >= 10)

    def describe_excluded(self) -> list[str]:
        """Return a sentence for each excluded slot, with the reason."""
        return [f"{slot} was excluded: {note.message}" for slot, note in self.excluded_slots().items()]

    def is_given_up(self, unit: int, live: Collection[str], excluded: Collection[str] | None = None) -> bool:
        """Return True if no further attempt at a unit is worthwhile.

        Args:
            live: the slots of all live ranks.
            excluded: the result of ``excluded()``; computed by default.
        """
        tried = [note.slot for note in self.failures(unit)]
        if len(tried) < MAX_FAILURES:
            return False
        # A failure counts against the unit if the slot has completed other units and is not excluded.
        counted = [slot for slot in tried if slot in self._done and not self._is_bad(slot)]
        # If too few failures count, the failed slots may be bad themselves, so slots that have not tried the unit must
        # decide.
        slots = set(counted) if len(counted) >= MAX_FAILURES else set()
        excluded = self.excluded() if excluded is None else excluded
        others = {slot for slot in live if not is_among(slot, excluded)} - set(tried)
        other_hosts = {*map(host_of, others)} - {*map(host_of, tried)}
        is_tried = not others or len(slots) >= MAX_FAILURES
        return is_tried and (not other_hosts or len({*map(host_of, slots)}) >= MAX_FAILURES)

    def all_excluded_error(self, stage: str, logs: Path) -> SharmillError:
        """Return the last error of a stage that has no usable slots left, or describe it if it has no code."""
        notes = list(self.excluded_slots().values())
        last = max(notes, key=lambda note: note.time)
        if last.code:
            return last.as_error()
        units = sorted({note.unit for note in notes} - {SETUP})
        named = f" on units {', '.join(map(str, units))}" if units else ""
        return FatalError(
            f"{stage}: no usable rank is left after failures{named}; the last error: {last.message}; see {logs}",
            code="no_ranks",
        )


def host_of(slot: str) -> str:
    """Return the host of a slot."""
    return slot.partition("/")[0]


def is_among(slot: str, excluded: Collection[str]) -> bool:
    """Return True if a slot or its host is among the excluded ones."""
    return slot in excluded or host_of(slot) in excluded
