"""Attempts at units: notes that all ranks write and read, and what follows from them for units and slots.

An attempt is noted before it begins and when it ends, with its slot. A failed one counts against the unit only if its
slot has done another unit; else the slot may be what is bad. A slot on which several units fail that others do, or
on which many fail and none is done, is taken out. So a bad slot or host costs no unit that a good one can do, and a bad
unit is given up after a few attempts. As in the ledger, each process appends to a file of its own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from sharmill.engine.outcomes import FailedAttempt
from sharmill.errors import CODES, ConfigError, DeviceError, FatalError, SharmillError
from sharmill.files.stored import NOT_JSON, RecordLog, Tail

log = logging.getLogger(__name__)

# A unit that has failed so often is given up, and a slot that has failed with so many, of which others did one, is out.
MAX_FAILURES = 3
# Where nothing has been done anywhere, a lone good slot may have met some bad units first.
_MOST_UNITS_WITHOUT_PROOF = 10
# A unit whose rank is told to leave each time, as by preemption, has to come to an end too.
MAX_RELEASES = 10
# The number of a unit in notes about the set-up of a rank.
SETUP = -1
# Codes of errors of a rank that another try in the same slot would end with as well.
FINAL_CODES = frozenset({"disk", "missing_package", "other_device", "out_of_memory", "unlike_nodes"})


NoteKind = Literal["begun", "done", "failed", "released", "stopped"]


class Note(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event of an attempt at a unit, or of the set-up of a rank, or an error that has stopped the stage for all.

    ``owner`` is the id of the rank's process, and ``generation`` that of its claim on the unit. ``time`` is by the
    clock of the slot's host. ``place`` is that of a ``DeviceError``, and ``code`` and ``details`` are those of the
    error.
    """

    kind: NoteKind
    slot: str
    owner: str = ""
    unit: int = SETUP
    generation: int = 0
    time: float = msgspec.field(default_factory=time.time)
    message: str = ""
    traceback: str = ""
    code: str = ""
    details: list[str] = []
    place: str = ""
    is_config: bool = False

    def as_error(self) -> SharmillError:
        """Return the error that has ended a rank, to be raised."""
        code = self.code if self.code in CODES else "unspecified"
        if self.place:
            return DeviceError(self.message, place=self.place, code=code)
        kind = ConfigError if self.is_config else FatalError
        return kind(self.message, code=code, details=self.details)


_decoder = msgspec.json.Decoder(Note)


class Attempts:
    """The attempts at the units of a stage, as far as this process has read the notes; ``look`` reads what is new.

    Attributes:
        stopped: the error that ends the stage for all ranks, None as long as there is none.
        failed: the units of which an attempt has failed.
    """

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder)
        # Of each unit, by the generation of the claim: the note of the end, or of the begin as long as it is under way.
        self._units: dict[int, dict[int, Note]] = {}
        # Of each slot: the note of the last unit done, and those of what has failed since.
        self._slots: dict[str, list[Note]] = {}
        # The slots and hosts that are out, once that was asked for.
        self._out: set[str] | None = None
        self.stopped: SharmillError | None = None
        self.failed: set[int] = set()
        self.look()

    def look(self) -> None:
        """Read the notes that are new."""
        for path, line in self._tail.lines():
            try:
                self.add(_decoder.decode(line))
            except NOT_JSON as error:
                # A file system that lost its power may leave such lines.
                log.warning("a line of %s is no note: %s", path, error)

    def add(self, note: Note) -> None:
        """Take a note into account."""
        if note.kind == "stopped":
            self.stopped = note.as_error()
            return
        if note.unit != SETUP:
            attempts = self._units.setdefault(note.unit, {})
            if note.generation in attempts and attempts[note.generation].kind != "begun":
                # The rank and its supervisor, or who took the unit over, may both have noted the end.
                return
            released = sum(before.kind == "released" for before in attempts.values())
            if note.kind == "released" and released >= MAX_RELEASES:
                note = msgspec.structs.replace(note, kind="failed")
            attempts[note.generation] = note
            if note.kind == "failed":
                self.failed.add(note.unit)
        if note.kind in ("done", "failed"):
            notes = sorted([*self._slots.get(note.slot, []), note], key=lambda one: one.time)
            last_done = max((one.time for one in notes if one.kind == "done"), default=0.0)
            self._slots[note.slot] = [one for one in notes if one.time >= last_done]
            self._out = None

    @property
    def num_begun(self) -> int:
        """The number of attempts that have begun."""
        return sum(map(len, self._units.values()))

    def generation(self, unit: int) -> int:
        """Return the generation of the next claim on a unit, as far as is known: the one after the last that ended."""
        ended = [number for number, note in self._units.get(unit, {}).items() if note.kind != "begun"]
        return max(ended, default=-1) + 1

    def is_returned(self, unit: int) -> bool:
        """Return True if the last attempt at a unit has ended, in whatever way: a commit may have been taken back."""
        return self.generation(unit) > max(self._units.get(unit, {}), default=0)

    def open(self) -> list[Note]:
        """Return the notes of the attempts that have begun and not ended."""
        return [note for attempts in self._units.values() for note in attempts.values() if note.kind == "begun"]

    def failures(self, unit: int) -> list[Note]:
        """Return the attempts at a unit that have failed, whatever the reason, in their order."""
        return [note for _, note in sorted(self._units.get(unit, {}).items()) if note.kind == "failed"]

    def error(self, unit: int) -> FailedAttempt:
        """Return the last error of a unit, in words where no attempt has noted one."""
        gone = "its ranks have left before it was done"
        if not (failures := self.failures(unit)):
            return FailedAttempt(unit, gone, gone)
        return FailedAttempt(unit, failures[-1].message, failures[-1].traceback)

    def is_out(self, slot: str) -> bool:
        """Return True if a slot, or its host, is taken out of work."""
        if self._out is None:
            bad = set(self.slots_out())
            useful = {host_of(name) for name in self._slots if name not in bad and self._has_done(name)}
            hosts = Counter(map(host_of, bad))
            bad_hosts = {host for host, number in hosts.items() if number >= MAX_FAILURES and host not in useful}
            self._out = bad | (bad_hosts if useful else set())
        return slot in self._out or host_of(slot) in self._out

    def _has_done(self, slot: str) -> bool:
        return any(note.kind == "done" for note in self._slots[slot])

    def _is_bad(self, slot: str) -> bool:
        """Return True if a slot is to blame for its failures: others did one of these units, or it did none of many."""
        failed = [note for note in self._slots[slot] if note.kind == "failed"]
        setups = [note for note in failed if note.unit == SETUP]
        if len(setups) >= MAX_FAILURES or any(note.code in FINAL_CODES for note in setups):
            return True
        units = {note.unit for note in failed} - {SETUP}
        if len(units) < MAX_FAILURES:
            return False
        is_disproved = any(note.kind == "done" for unit in units for note in self._units[unit].values())
        return is_disproved or (not self._has_done(slot) and len(units) >= _MOST_UNITS_WITHOUT_PROOF)

    def slots_out(self) -> dict[str, Note]:
        """Return the slots that are out by their own failures, and the last error of each."""
        return {slot: notes[-1] for slot, notes in sorted(self._slots.items()) if self._is_bad(slot)}

    def describe_out(self) -> list[str]:
        """Return a sentence for each slot that was taken out of work."""
        return [f"{slot} was taken out of work: {note.message}" for slot, note in self.slots_out().items()]

    def is_given_up(self, unit: int, live: Collection[str]) -> bool:
        """Return True if no further attempt at a unit is worth it.

        Args:
            live: the slots of all ranks that are at work.
        """
        tried = [note.slot for note in self.failures(unit)]
        if len(tried) < MAX_FAILURES:
            return False
        # A failure counts against the unit if the slot has done other units, and is not out.
        counted = [slot for slot in tried if self._has_done(slot) and not self._is_bad(slot)]
        # Where the same slots could be bad, those that have not tried it are to tell.
        slots = set(counted) if len(counted) >= MAX_FAILURES else set()
        others = {slot for slot in live if not self.is_out(slot)} - set(tried)
        other_hosts = {*map(host_of, others)} - {*map(host_of, tried)}
        is_tried = not others or len(slots) >= MAX_FAILURES
        return is_tried and (not other_hosts or len({*map(host_of, slots)}) >= MAX_FAILURES)

    def all_out_error(self, stage: str, logs: Path) -> SharmillError:
        """Return the error of a stage of which every slot is out; it names the last, and all their reasons."""
        out = list(self.slots_out().values())
        last = max(out, key=lambda note: note.time)
        if last.code:
            return last.as_error()
        units = sorted({note.unit for note in out} - {SETUP})
        named = f" on units {', '.join(map(str, units))}" if units else ""
        return FatalError(f"{stage}: no rank can work{named}: the last one {last.message}; see {logs}", code="no_ranks")


def end_attempt(
    notes: RecordLog, attempts: Attempts, begun: Note, kind: NoteKind, message: str = "", traceback: str = ""
) -> None:
    """Note how an attempt has ended, where all ranks see it."""
    note = msgspec.structs.replace(begun, kind=kind, message=message, traceback=traceback, time=time.time())
    with suppress(FileNotFoundError):  # the folder may have gone with the plan
        notes.append(note)
    attempts.add(note)


def host_of(slot: str) -> str:
    """Return the host of a slot."""
    return slot.partition("/")[0]
