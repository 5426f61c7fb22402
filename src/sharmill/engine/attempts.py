"""Attempts at units: what ranks and their supervisors note of them, and what follows for units, slots and hosts.

An attempt begins with its claim and ends with a commit, or with a note that has its slot. A failed one counts against
the unit only if its slot has done another unit; else the slot may be what is bad. A slot on which several units fail
that others do, or on which many fail and none is done, is taken out. So a bad slot or host costs no unit that a good
one can do, and a bad unit is given up after a few attempts.
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

# A unit that has failed so often is given up, and a slot that has failed with so many, of which others did one, is out.
MAX_FAILURES = 3
# The number of a unit in notes about the set-up of a rank.
SETUP = -1
# Codes of errors of a rank that another try in the same slot would end with as well.
FINAL_CODES = frozenset({"disk", "missing_package", "other_device", "out_of_memory", "unlike_nodes"})
# A unit whose rank is told to leave so often, as by preemption, has failed the next time.
_MAX_RELEASES = 10


class Claim(msgspec.Struct, kw_only=True):
    """The content of a claim on a unit: the process of the rank that has it, its slot, and when it was made.

    ``time`` is by the clock of the slot's host.
    """

    owner: str = ""
    slot: str = ""
    time: float = msgspec.field(default_factory=time.time)


NoteKind = Literal["failed", "released", "stopped"]


class Note(StoredError, tag="note", tag_field="type", kw_only=True, omit_defaults=True):
    """The end of an attempt without a commit, or of the set-up of a rank, or an error that stops the stage for all.

    ``owner`` is the id of the rank's process, and ``generation`` that of its claim on the unit. ``time`` is by the
    clock of the slot's host. It counts for the ``launch`` alone in which it was made.
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
    """The attempts at the units of a stage in one launch, as far as their ends were read.

    Attributes:
        stopped: the error that ends the stage for all ranks, None as long as there is none.
        tried: the units of which an attempt has ended without a commit.
        failed: those of which one has failed.
        num_ended: how many attempts have ended.
    """

    def __init__(self, launch: str) -> None:
        self.launch = launch
        self.stopped: SharmillError | None = None
        self.failed: set[int] = set()
        self.num_ended = 0
        # Of each unit, by the generation of the claim: how the attempt has ended.
        self._units: dict[int, dict[int, Note]] = {}
        self.tried = self._units.keys()
        self._committed: set[int] = set()
        # Of each slot: when it was last done with a unit, and the notes of what has failed since.
        self._done: dict[str, float] = {}
        self._failures: dict[str, list[Note]] = {}

    def add(self, record: Note | Commit) -> None:
        """Take a record of a log into account; those of other launches do not count."""
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
                # The rank and its supervisor, or the leader, may both have noted the end.
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
        """Return the generation of the next claim on a unit: the one after the last that has ended."""
        return max(self._units.get(unit, ()), default=-1) + 1

    def has_ended(self, unit: int, generation: int) -> bool:
        """Return True if the end of an attempt is known."""
        return generation in self._units.get(unit, ())

    def failures(self, unit: int) -> list[Note]:
        """Return the attempts at a unit that have failed, whatever the reason, in their order."""
        return [note for _, note in sorted(self._units.get(unit, {}).items()) if note.kind == "failed"]

    def error(self, unit: int) -> FailedAttempt:
        """Return the last error of a unit, in words where no attempt has noted one."""
        gone = "its ranks have left before it was done"
        if not (failures := self.failures(unit)):
            return FailedAttempt(unit, gone, gone)
        return FailedAttempt(unit, failures[-1].message, failures[-1].traceback or failures[-1].message)

    def out(self) -> set[str]:
        """Return the slots that are taken out of work, and the hosts of which no slot is of use."""
        bad = set(self.slots_out())
        useful = {host_of(slot) for slot in self._done if slot not in bad}
        hosts = Counter(map(host_of, bad))
        bad_hosts = {host for host, number in hosts.items() if number >= MAX_FAILURES and host not in useful}
        return bad | (bad_hosts if useful else set())

    def slots_out(self) -> dict[str, Note]:
        """Return the slots that are out by their own failures, and the last error of each."""
        return {slot: self._since(slot)[-1] for slot in sorted(self._failures) if self._is_bad(slot)}

    def error_of_all(self, num_ranks: int) -> SharmillError | None:
        """Return the error with which so many ranks, or more, could not begin; None if one has, or ended otherwise.

        Ranks on a single host tell nothing: it may be the host that is bad.
        """
        last = list(self.slots_out().values())
        kinds, hosts = {(note.unit, note.code) for note in last}, {host_of(note.slot) for note in last}
        are_enough = len(last) >= num_ranks and len(hosts) > 1
        if self._done or not are_enough or len(kinds) > 1 or last[0].unit != SETUP or not last[0].code:
            return None
        return last[0].as_error()

    def _since(self, slot: str) -> list[Note]:
        """Return what has failed in a slot since it was last done with a unit, in order."""
        done = self._done.get(slot, 0.0)
        return sorted((note for note in self._failures.get(slot, ()) if note.time >= done), key=lambda note: note.time)

    def _is_bad(self, slot: str) -> bool:
        """Return True if a slot is to blame for its failures: others did one of these units, or it did none of many."""
        failed = self._since(slot)
        setups = [note for note in failed if note.unit == SETUP]
        if len(setups) >= MAX_FAILURES or any(note.code in FINAL_CODES for note in setups):
            return True
        units = {note.unit for note in failed} - {SETUP}
        if len(units) < MAX_FAILURES:
            return False
        # Where nothing has been done anywhere, a lone good slot may have met some bad units first.
        return bool(units & self._committed) or (slot not in self._done and len(units) >= 10)

    def describe_out(self) -> list[str]:
        """Return a sentence for each slot that was taken out of work."""
        return [f"{slot} was taken out of work: {note.message}" for slot, note in self.slots_out().items()]

    def is_given_up(self, unit: int, live: Collection[str], out: Collection[str] | None = None) -> bool:
        """Return True if no further attempt at a unit is worth it.

        Args:
            live: the slots of all ranks that are at work.
            out: as ``out`` returns.
        """
        tried = [note.slot for note in self.failures(unit)]
        if len(tried) < MAX_FAILURES:
            return False
        # A failure counts against the unit if the slot has done other units, and is not out.
        counted = [slot for slot in tried if slot in self._done and not self._is_bad(slot)]
        # Where the same slots could be bad, those that have not tried it are to tell.
        slots = set(counted) if len(counted) >= MAX_FAILURES else set()
        out = self.out() if out is None else out
        others = {slot for slot in live if not is_among(slot, out)} - set(tried)
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


def host_of(slot: str) -> str:
    """Return the host of a slot."""
    return slot.partition("/")[0]


def is_among(slot: str, out: Collection[str]) -> bool:
    """Return True if a slot, or its host, is among those that are taken out of work."""
    return slot in out or host_of(slot) in out
