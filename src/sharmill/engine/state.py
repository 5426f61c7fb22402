"""The state of a stage that is at work, as one process reads it: attempts, commits, and which ranks are alive.

An attempt is noted before it begins and when it ends, with its slot. A failed one counts against the unit only if its
slot has done another unit; else the slot may be what is bad. A slot on which several units fail that others do, or
on which many fail and none is done, is taken out. So a bad slot or host costs no unit that a good one can do, and a bad
unit is given up after a few attempts. As in the ledger, each process appends to a file of its own.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal
from uuid import uuid4

import msgspec

from sharmill.engine.balance import pack
from sharmill.engine.fence import is_current
from sharmill.engine.plan import iterate_ledger
from sharmill.engine.progress import BEATS_PER_LEASE, ProgressWriter, RankProgress, read_progress
from sharmill.engine.run_dir import RunDir, StageDir, StoredError
from sharmill.engine.stage import RunOptions, StageRun
from sharmill.engine.unit import Commit, FailedAttempt, Unit
from sharmill.errors import HARMLESS_REASONS, REMEDIES, FatalError, SharmillError
from sharmill.files.atomic import make_folder, remove, write_atomic
from sharmill.files.record_log import RecordLog, Tail
from sharmill.files.shared_disk import time_of_folder
from sharmill.files.stored import load_record, read_records
from sharmill.manifest import Reject

# A unit that has failed so often is given up, and a slot that has failed with so many, of which others did one, is out.
MAX_FAILURES = 3
# The number of a unit in notes about the set-up of a rank.
SETUP = -1
# Codes of errors of a rank that another try in the same slot would end with as well.
FINAL_CODES = frozenset({"disk", "missing_package", "other_device", "out_of_memory", "unlike_nodes"})


NoteKind = Literal["begun", "done", "failed", "released", "stopped"]


class Note(StoredError, kw_only=True, omit_defaults=True):
    """An event of an attempt at a unit, or of the set-up of a rank, or an error that has stopped the stage for all.

    ``owner`` is the id of the rank's process, and ``generation`` that of its claim on the unit. ``time`` is by the
    clock of the slot's host.
    """

    kind: NoteKind
    slot: str
    owner: str = ""
    unit: int = SETUP
    generation: int = 0
    time: float = msgspec.field(default_factory=time.time)
    traceback: str = ""


class Attempts:
    """The attempts at the units of a stage, as far as this process has read the notes; ``look`` reads what is new.

    Attributes:
        log: the notes of this process.
        stopped: the error that ends the stage for all ranks, None as long as there is none.
        failed: the units of which an attempt has failed.
    """

    def __init__(self, folder: Path) -> None:
        self.log = RecordLog(folder)
        self._tail = Tail(folder, Note)
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
        for note in self._tail.records():
            self.add(note)

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
            # A unit whose rank is told to leave each time, as by preemption, has to come to an end too.
            if note.kind == "released" and released >= 10:
                note = msgspec.structs.replace(note, kind="failed")
            attempts[note.generation] = note
            if note.kind == "failed":
                self.failed.add(note.unit)
        if note.kind in ("done", "failed"):
            notes = sorted([*self._slots.get(note.slot, []), note], key=lambda one: one.time)
            last_done = max((one.time for one in notes if one.kind == "done"), default=0.0)
            self._slots[note.slot] = [one for one in notes if one.time >= last_done]
            self._out = None

    def end(self, begun: Note, kind: NoteKind, message: str = "", traceback: str = "") -> None:
        """Note how an attempt has ended, where all ranks see it."""
        note = msgspec.structs.replace(
            begun, kind=kind, message=message, traceback=traceback or message, time=time.time()
        )
        with suppress(FileNotFoundError):  # the folder may have gone with the plan
            self.log.append(note)
        self.add(note)

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
        # Where nothing has been done anywhere, a lone good slot may have met some bad units first.
        return is_disproved or (not self._has_done(slot) and len(units) >= 10)

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


def host_of(slot: str) -> str:
    """Return the host of a slot."""
    return slot.partition("/")[0]


class Round(msgspec.Struct):
    """The division of units among the ranks of a stage, frozen until all of them have ended.

    ``bins`` are the indices of the units of each rank, none for ranks that came later. ``begun`` is how many attempts
    there had been each time that ranks were started in the run, last at these ranks. ``join_seconds`` is how long ranks
    may take to join that could do what those which are there cannot.
    """

    bins: list[list[int]]
    join_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    begun: list[int] = []


def begin_round(
    stage: StageRun,
    missing: Sequence[Unit],
    num_ranks: int,
    *,
    join_seconds: float = 0.0,
    goes_on: bool = False,
    joins: bool = False,
) -> range:
    """Divide units among ranks by their cost, and return the numbers of the ranks; or add ranks to those at work.

    Of ranks that have all ended the claims are forgotten. The caller holds the lock of the run directory.

    Args:
        missing: the units that are to be done.
        join_seconds: as that of ``Round``.
        goes_on: the attempts of ranks that have ended count on; else they are forgotten too.
        joins: other ranks are there, or about to begin.
    """
    ranks = stage.ranks
    if joins:
        round = load_record(ranks.round, Round)
        numbers = range(len(round.bins), len(round.bins) + num_ranks)
        round.bins += [[] for _ in numbers]
    else:
        begun = load_record(ranks.round, Round).begun if goes_on and ranks.round.exists() else []
        for folder in (ranks.claims, ranks.progress, *(() if goes_on else (ranks.attempts,))):
            remove(folder)
            make_folder(folder)
        attempts = end_attempts(stage.dir, {unit.index for unit in missing})
        bins = [[unit.index for unit in part] for part in pack_units(missing, num_ranks)]
        numbers = range(len(bins))
        round = Round(bins, join_seconds, [*begun, attempts.num_begun])
    write_atomic(ranks.round, msgspec.json.encode(round), parents=False)
    return numbers


@contextmanager
def driven_round(
    stage: StageRun, missing: Sequence[Unit], num_ranks: int, *, join_seconds: float = 0.0, goes_on: bool = False
) -> Iterator[range]:
    """Begin a round, or join that of ranks at work, and give heartbeats until all have ended; see ``begin_round``.

    An error ends the context alone if another process has finished the stage, or begun it anew.
    """
    joins = bool(find_live(stage.dir, stage.options.lease_seconds))
    numbers = begin_round(stage, missing, num_ranks, join_seconds=join_seconds, goes_on=goes_on, joins=joins)
    path, interval = stage.ranks.progress / f"driver-{uuid4().hex}.json", stage.options.lease_seconds / BEATS_PER_LEASE
    with ProgressWriter(path, interval=interval):
        try:
            yield numbers
        except (FatalError, FileNotFoundError):
            # Another process may have finished the stage, or begun it anew.
            if is_current(stage):
                raise


def find_workers(run_dir: RunDir, *, ranks: bool = True) -> list[str]:
    """Return a few words about each process that may be at work on a run; ``ranks`` as that of ``find_live``."""
    # Unlike the method of a path, this passes over folders that another process removes meanwhile.
    names = [*glob("*/ranks", root_dir=run_dir.path), *glob("*/*/ranks", root_dir=run_dir.path)]  # noqa: PTH207
    folders = sorted((run_dir.path / name).parent for name in names)
    return [words for folder in folders for words in find_live(StageDir(folder), ranks=ranks)]


def describe_workers(live: Sequence[str]) -> str:
    """Return words that name processes which are at work on a run, whatever their number."""
    more = f" and {len(live) - 3} more" if len(live) > 3 else ""
    return f"{', '.join(live[:3])}{more}"


def find_live(paths: StageDir, lease_seconds: float = RunOptions.lease_seconds, *, ranks: bool = True) -> list[str]:
    """Return a few words about each process that may be at work on the plan of a stage that is not finished.

    Args:
        ranks: also ranks, rather than their drivers alone; a scheduler's queue knows better than heartbeats which ranks
            are alive.
    """
    found = paths.ranks
    if paths.done.exists() or not found.round.exists():
        return []
    # By the clock of the file system, as what is written there; what others have just made is seen from here on.
    now = time_of_folder(found.path)
    records = read_progress(found.progress, "*.json" if ranks else "driver-*.json")
    live = [one for one in records if one.is_alive(now, lease_seconds)]
    return [f"{f'rank {one.rank}' if one.slot else f'process {one.pid}'} on {one.host}" for one in live]


def pack_units(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """Return the units of each rank, balanced by cost; never more ranks than units, and no rank without one."""
    # Units without cost would all be packed into one bin.
    costs = [max(unit.cost, 1e-3) for unit in units]
    return [[units[index] for index in part] for part in pack(costs, min(num_ranks, len(units))) if part]


def end_attempts(paths: StageDir, missing: Container[int]) -> Attempts:
    """Note the end of attempts whose ranks could not do so, and return all attempts.

    ``missing`` are the units without a commit.
    """
    attempts = Attempts(paths.ranks.attempts)
    for begun in attempts.open():
        kind: NoteKind = "failed" if begun.unit in missing else "done"
        attempts.end(begun, kind, f"its rank on {begun.slot} ended in the middle of it; see {paths.logs}")
    return attempts


class StageState:
    """The units of a stage that are not committed, and the attempts at them; ``look`` reads what is new of both.

    Args:
        stage: its plan is the present one.
        last_beat: returns the time of the last heartbeat of this process that got through, by ``time.monotonic``.

    Attributes:
        missing: the indices of the units that no rank has committed.
        expected_in: how many records all units have.
        rejects: how many records were rejected, by reason.
        num_in: how many records were read for that.
    """

    def __init__(self, stage: StageRun, last_beat: Callable[[], float] = lambda: math.inf) -> None:
        self.stage = stage
        self.attempts = Attempts(stage.ranks.attempts)
        self.units = stage.dir.read_units()
        self.expected_in = sum(unit.size for unit in self.units)
        self.round = load_record(stage.ranks.round, Round)
        self.missing = {index for part in self.round.bins for index in part}
        self._last_beat = last_beat
        self._given_up_since: float | None = None
        self._ledger = Tail(stage.ranks.ledger, Commit)
        self._uncommitted = {unit.index: unit.id for unit in self.units}
        self._watched: dict[str, tuple[float, float]] = {}
        self.rejects: Counter[str] = Counter()
        self.num_in = 0

    def look(self) -> list[Commit]:
        """Read what is new, and return the commits of units that were missing."""
        # First the notes: of what is noted as done the commit is there.
        self.attempts.look()
        new = []
        for commit in iterate_ledger(self.stage.dir, self._uncommitted, self._ledger):
            # A second commit of a unit counts for nothing.
            del self._uncommitted[commit.index]
            self.rejects.update(commit.rejects)
            self.num_in += commit.num_in
            if commit.index in self.missing:
                self.missing.remove(commit.index)
                new.append(commit)
        return new

    def has_ended(self) -> bool:
        """Return True if no rank can do anything more: each unit is committed or given up, or the stage is stopped."""
        if not self.missing or self.attempts.stopped is not None:
            return True
        if not (self.missing <= self.attempts.failed and self._are_given_up()):
            self._given_up_since = None
            return False
        if self._given_up_since is None:
            self._given_up_since = time.monotonic()
        is_over = time.monotonic() - self._given_up_since >= self.round.join_seconds
        return is_over or self._are_given_up("another host/rank")

    def _are_given_up(self, *joining: str) -> bool:
        live = self.live_slots() | {*joining}
        return all(self.attempts.is_given_up(index, live) for index in self.missing)

    def live_slots(self) -> set[str]:
        """Return the slots of the ranks that are alive, and have loaded what they need or may do so soon."""
        lease = self.stage.options.lease_seconds
        # One that hangs while it loads is waited for by nobody.
        return {
            one.slot
            for one in read_progress(self.stage.ranks.progress)
            if not self.is_dead(one.owner, one) and (one.ready or one.updated - one.started < lease)
        }

    def is_dead(self, owner: str, record: RankProgress | None) -> bool:
        """Return True if a rank has ended, or its heartbeat was the same for a lease by this process's clock.

        Args:
            owner: the id of its process.
            record: its heartbeat, None where there is none.
        """
        if record is not None and record.ended:
            return True
        now, lease = time.monotonic(), self.stage.options.lease_seconds
        beat = record.updated if record is not None else 0.0
        seen, since = self._watched.get(owner, (None, now))
        # While none of its own heartbeats gets through for this share of a lease, a rank takes no other for dead.
        if beat != seen or now - self._last_beat() > 0.4 * lease:
            since = now
        self._watched[owner] = (beat, since)
        is_gone = record is not None and record.is_known_dead()
        # If the rank has a supervisor, that notes how it ended within a second.
        return now - since >= (min(lease, 3.0) if is_gone else lease)


def check_rejects(stage: StageRun, expected_in: int, reasons: Mapping[str, int], num_in: int) -> None:
    """Raise FatalError with the commonest reasons if these are more rejects than the configuration allows.

    Args:
        expected_in: how many records all units of the stage have.
        reasons: how many records were rejected so far, by reason.
        num_in: how many records were read for that.
    """
    reasons = {reason: count for reason, count in reasons.items() if reason not in HARMLESS_REASONS}
    rejected = sum(reasons.values())
    # A quotient, since 0.29 * 100 is less than 29.
    if rejected == 0 or rejected / expected_in <= stage.options.max_reject_fraction:
        return
    # Where nothing is left, a higher limit would only move the error to the next stage.
    remedy = "mend the input" if rejected >= num_in else "mend the input, or raise max_reject_fraction"
    folder = stage.ranks.rejects
    raise FatalError(
        f"{stage.name} stopped: {rejected} of {expected_in} records are rejected, more than "
        f"max_reject_fraction={stage.options.max_reject_fraction:g} allows; {remedy}. The commonest reasons "
        f"(all: {folder}):",
        code="too_many_rejects",
        details=describe_rejects(folder, reasons),
    )


def describe_rejects(folder: Path, reasons: Mapping[str, int]) -> list[str]:
    """Return a line for each of the commonest reasons: its count, the first sentence, and the remedy.

    Args:
        folder: a stage's folder of rejects, one file a unit.
        reasons: how many records were rejected, by reason.
    """
    commonest = Counter(reasons).most_common(3)
    examples = dict.fromkeys((reason for reason, _ in commonest), "")
    for reject in chain.from_iterable(read_records(path, Reject) for path in sorted(folder.glob("*.jsonl"))):
        if examples.get(reject.reason) == "":
            # With the name of its audio where the sentence does not have it.
            name = reject.record.get("audio_filepath") if isinstance(reject.record, dict) else None
            is_named = not isinstance(name, str) or name in reject.detail
            text = reject.detail if is_named else f"{name}: {reject.detail}"
            text = " ".join(text.split())
            # Whole sentences, unless something foreign in them is long.
            examples[reject.reason] = f", the first: {text if len(text) <= 400 else text[:397] + '...'}"
        if all(examples.values()):
            break
    return [f"{reason} {count}{examples[reason]}. To do: {REMEDIES[reason]}" for reason, count in commonest]
