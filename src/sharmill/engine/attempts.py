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
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from uuid import uuid4

import msgspec

from sharmill.engine.outcomes import FailedAttempt
from sharmill.engine.rundir import StageDir
from sharmill.engine.stored import NOT_JSON, Tail, decode_stored, read_stored
from sharmill.errors import CODES, ConfigError, DeviceError, FatalError, SharmillError
from sharmill.storage import open_stored, stopping_errors, write_atomic

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


NoteKind = Literal["begun", "done", "failed", "released"]


class Note(msgspec.Struct, kw_only=True):
    """An event of an attempt at a unit, or of the set-up of a rank.

    ``owner`` is the id of the rank's process, and ``generation`` that of its claim on the unit. ``time`` is by the
    clock of the slot's host. ``place`` is that of a ``DeviceError``, and ``code`` that of the error.
    """

    kind: NoteKind
    slot: str
    owner: str = ""
    unit: int = SETUP
    generation: int = 0
    time: float = 0.0
    message: str = ""
    traceback: str = ""
    code: str = ""
    place: str = ""


_decoder = msgspec.json.Decoder(Note)


class AttemptLog:
    """The notes of one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._stopped = _stopped_path(folder)

    def add(self, note: Note) -> None:
        """Append a note; it is in the file when this returns, but not on disk."""
        note.time = time.time()
        path, self._path = self._path or self._folder / f"{uuid4().hex}.jsonl", None
        with stopping_errors(path), open_stored(path, append=True) as stream:
            stream.write(msgspec.json.encode(note) + b"\n")
        # Kept only after a success: after a failed write the file may end in half a line, and gets no more.
        self._path = path

    def stop(self, error: SharmillError) -> None:
        """Note an error that ends the stage for all ranks."""
        stored = Stopped(error.code, list(error.lines), isinstance(error, ConfigError))
        write_atomic(self._stopped, msgspec.json.encode(stored), parents=False)


class Stopped(msgspec.Struct):
    """An error that ends the stage for all ranks, as it is stored."""

    code: str
    lines: list[str]
    is_config: bool

    def as_error(self) -> SharmillError:
        """Return the error, to be raised."""
        code = self.code if self.code in CODES else "unspecified"
        message, *details = self.lines or ["a rank has stopped the stage"]
        return (ConfigError if self.is_config else FatalError)(message, code=code, details=details)


@dataclass
class _Slot:
    """The record of a slot. Since it last did a unit, ``failed`` are those that failed there, at their times, and
    ``setups`` counts the ranks that could not be set up."""

    num_done: int = 0
    last_done: float = 0.0
    setups: int = 0
    is_final: bool = False
    failed: dict[int, float] = field(default_factory=dict)
    error: Note | None = None

    def forget_before(self, moment: float) -> None:
        self.failed = {unit: when for unit, when in self.failed.items() if when > moment}


@dataclass
class _Unit:
    generation: int = 0
    """The one after the last that has ended."""
    open: dict[int, Note] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    failures: list[Note] = field(default_factory=list)
    releases: int = 0


class Attempts:
    """The attempts at the units of a stage, as far as this process has read the notes; ``look`` reads what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = Tail(folder)
        self._slots: dict[str, _Slot] = {}
        self._units: dict[int, _Unit] = {}
        self._done: set[int] = set()
        # The slots and the hosts that are out, once that was asked for.
        self._bad: set[str] | None = None
        self._bad_hosts: set[str] = set()
        self.num_begun = 0
        # Units of which an attempt has failed, and those whose last that is known has failed or was given back.
        self.failed: set[int] = set()
        self.returned: set[int] = set()

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
        self._bad = None
        slot = self._slots.setdefault(note.slot, _Slot())
        if note.unit == SETUP:
            self._add_setup(slot, note)
            return
        unit = self._units.setdefault(note.unit, _Unit())
        if note.kind == "begun":
            self.num_begun += 1
            if note.generation not in unit.ended:
                unit.open[note.generation] = note
                if note.generation >= unit.generation:
                    self.returned.discard(note.unit)
            return
        unit.open.pop(note.generation, None)
        if note.generation in unit.ended:
            # The rank and its supervisor, or who took the unit over, may both have noted the end.
            return
        unit.ended.add(note.generation)
        if note.kind == "done":
            self._done.add(note.unit)
            slot.num_done += 1
            slot.setups = 0
            slot.last_done = max(slot.last_done, note.time)
            slot.forget_before(slot.last_done)
        if note.generation >= unit.generation:
            unit.generation = note.generation + 1
            if unit.generation not in unit.open:
                # Also where it is done: its output may be lost, and its commit taken back.
                self.returned.add(note.unit)
        if note.kind == "done":
            return
        unit.releases += note.kind == "released"
        if note.kind == "failed" or unit.releases > MAX_RELEASES:
            unit.failures.append(note)
            self.failed.add(note.unit)
            slot.error = note
            if note.time > slot.last_done:
                slot.failed[note.unit] = note.time

    def _add_setup(self, slot: _Slot, note: Note) -> None:
        slot.setups += 1
        slot.is_final = slot.is_final or note.code in FINAL_CODES
        slot.error = note

    def generation(self, unit: int) -> int:
        """Return the generation of the next claim on a unit, as far as is known."""
        return self._units[unit].generation if unit in self._units else 0

    def open(self) -> list[Note]:
        """Return the notes of the attempts that have begun and not ended."""
        return [note for unit in self._units.values() for note in unit.open.values()]

    def begun(self, unit: int, generation: int) -> Note | None:
        """Return the note of an attempt that has begun and not ended."""
        return self._units[unit].open.get(generation) if unit in self._units else None

    def num_failures(self, unit: int) -> int:
        """Return how many attempts at a unit have failed, whatever the reason."""
        return len(self._units[unit].failures) if unit in self._units else 0

    def error(self, unit: int) -> FailedAttempt | None:
        """Return the last error of a unit that has failed."""
        if not self.num_failures(unit):
            return None
        note = self._units[unit].failures[-1]
        return FailedAttempt(unit, note.message, note.traceback)

    def require_error(self, unit: int) -> FailedAttempt:
        """Return the last error of a unit, in words where no attempt has noted one."""
        gone = "its ranks have left before it was done"
        return self.error(unit) or FailedAttempt(unit, gone, gone)

    def has_failed_in(self, unit: int, slot: str) -> bool:
        """Return True if an attempt at a unit has failed in a slot."""
        return unit in self._units and any(note.slot == slot for note in self._units[unit].failures)

    def is_out(self, slot: str) -> bool:
        """Return True if a slot, or its host, is taken out of work."""
        if self._bad is None:
            self._bad = {name for name, one in self._slots.items() if self._is_bad(one)}
            bad = Counter(map(host_of, self._bad))
            useful = {host_of(name) for name, one in self._slots.items() if one.num_done and name not in self._bad}
            self._bad_hosts = {
                host for host, number in bad.items() if number >= MAX_FAILURES and useful - {host}
            } - useful
        return slot in self._bad or host_of(slot) in self._bad_hosts

    def _is_bad(self, slot: _Slot) -> bool:
        """Return True if a slot is to blame for its failures: others did one of these units, or it did none of many."""
        if slot.is_final or slot.setups >= MAX_FAILURES:
            return True
        if len(slot.failed) < MAX_FAILURES:
            return False
        is_disproved = not self._done.isdisjoint(slot.failed)
        return is_disproved or (slot.num_done == 0 and len(slot.failed) >= _MOST_UNITS_WITHOUT_PROOF)

    def slots_out(self) -> dict[str, Note]:
        """Return the slots that are out by their own failures, and the last error of each."""
        return {name: slot.error for name, slot in sorted(self._slots.items()) if slot.error and self._is_bad(slot)}

    def describe_out(self) -> list[str]:
        """Return a sentence for each slot that was taken out of work."""
        return [f"{slot} was taken out of work: {note.message}" for slot, note in self.slots_out().items()]

    def is_given_up(self, unit: int, live: Collection[str]) -> bool:
        """Return True if no further attempt at a unit is worth it.

        Args:
            live: the slots of all ranks that are at work.
        """
        if self.num_failures(unit) < MAX_FAILURES:
            return False
        usable = {slot for slot in live if not self.is_out(slot)}
        failures = self._units[unit].failures
        tried = {note.slot for note in failures}
        counted = [note.slot for note in failures if self._counts(note)]
        # Where the same slots could be bad, those that have not tried it are to tell.
        enough = counted if len(counted) >= MAX_FAILURES else []
        slots, hosts = set(enough), {host_of(slot) for slot in enough}
        others, other_hosts = usable - tried, {host_of(slot) for slot in usable - tried} - {*map(host_of, tried)}
        return (not others or len(slots) >= MAX_FAILURES) and (not other_hosts or len(hosts) >= MAX_FAILURES)

    def _counts(self, note: Note) -> bool:
        """Return True if a failure counts against its unit: the slot has done other units, and is not out."""
        slot = self._slots[note.slot]
        return slot.num_done > 0 and not self._is_bad(slot)

    def stopped(self) -> SharmillError | None:
        """Return the error that ends the stage for all ranks, if one was noted."""
        path = _stopped_path(self._folder)
        return decode_stored(path, read_stored(path), Stopped).as_error() if path.exists() else None

    def all_out_error(self, stage: str, logs: Path) -> FatalError:
        """Return the error of a stage of which every slot is out; it names the last, and all their reasons."""
        out = list(self.slots_out().values())
        last = max(out, key=lambda note: note.time)
        if last.place:
            return DeviceError(last.message, place=last.place, code=last.code)
        if last.code:
            return FatalError(last.message, code=last.code)
        named = _name_units(note.unit for note in out)
        return FatalError(f"{stage}: no rank can work{named}: the last one {last.message}; see {logs}", code="no_ranks")


def end_attempt(
    notes: AttemptLog, attempts: Attempts, begun: Note, kind: NoteKind, message: str = "", traceback: str = ""
) -> None:
    """Note how an attempt has ended, where all ranks see it."""
    note = msgspec.structs.replace(begun, kind=kind, message=message, traceback=traceback)
    with suppress(FileNotFoundError):  # the folder may have gone with the plan
        notes.add(note)
    attempts.add(note)


def describe_slots_out(paths: StageDir) -> list[str]:
    """Return a sentence for each slot that was taken out of the work on a stage."""
    attempts = Attempts(paths.attempts)
    attempts.look()
    return attempts.describe_out()


def host_of(slot: str) -> str:
    """Return the host of a slot."""
    return slot.partition("/")[0]


def _name_units(units: Iterable[int]) -> str:
    named = sorted({unit for unit in units if unit != SETUP})
    return f" on units {', '.join(map(str, named))}" if named else ""


def _stopped_path(folder: Path) -> Path:
    return folder / "stopped.json"
