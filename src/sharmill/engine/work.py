"""The loop of a rank, the same for every executor: claim a unit, attempt it, commit it, until none is left.

It ends when the stage has ended: each unit is committed or given up, or an error ends it for all.
"""

import logging
import os
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import uuid4

from sharmill.engine.curves import MetricsLog
from sharmill.engine.delays import spent_on, take_delays
from sharmill.engine.fence import require_current, wait_for_plan
from sharmill.engine.progress import (
    BEATS_PER_LEASE,
    ProgressWriter,
    peak_memory_mb,
    read_progress,
)
from sharmill.engine.stage import Processor, StageRun, WaitsForInput
from sharmill.engine.state import FINAL_CODES, Note, NoteKind, StageState, check_rejects
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import (
    REASONS_OF_NODES,
    ConfigError,
    DeviceError,
    FatalError,
    SharmillError,
    is_device_error,
    one_line,
)
from sharmill.files.arrays import write_array
from sharmill.files.atomic import open_atomic, write_atomic
from sharmill.files.disk import WRITE_ERRNOS, stopping_errors
from sharmill.files.record_log import RecordLog
from sharmill.files.shared_disk import VisibilityTimeout
from sharmill.files.staging import Staging
from sharmill.files.stored import create_once, read_stored
from sharmill.registry import describe_import_error

log = logging.getLogger(__name__)

# Codes of errors that may be those of one slot alone; a full disk is one only if it is that of the node.
_OF_SLOT = FINAL_CODES - {"disk"}


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

    The claim on a unit is the file ``<unit>.<generation>``, whose content names its owner; that of the highest
    generation holds. Where an attempt has ended without a commit, a rank may create the next generation; the end of an
    attempt whose rank has died, or whose heartbeat is stale, is noted by others. Of two that try, one succeeds, and
    neither can push a newer owner out: that one has created a later name. A claim is no guard. A rank that was taken
    for dead may go on with its unit; both bring the same bytes then.

    A rank does the units of its own bin first, then those of the bin with most cost left (work stealing, Blumofe and
    Leiserson 1999, doi:10.1145/324133.324234), then those whose attempts have failed, or were given back or left
    behind.

    Args:
        state: what is known of the stage.
        rank: the rank that takes them.

    Attributes:
        prefetches: the next unit is claimed early.
    """

    prefetches = False

    def __init__(self, state: StageState, rank: Rank) -> None:
        self._state = state
        self._rank = rank
        self._folder = state.stage.ranks.claims
        # Units of each bin that nobody has claimed, as of the last listing, and their cost.
        self._free: list[list[int]] = []
        self._cost_left: list[float] = []
        self._num_losses = 0
        self._held: tuple[Unit, int] | None = None

    def next(self) -> tuple[Unit, int, Unit | None] | None:
        """Return the next unit as soon as there is one, or None if nothing is left for this rank.

        Returned with it are the generation of its claim, and the unit that will probably come after it: that is
        claimed already, as long as there are enough for all ranks.
        """
        pause, num_bins = 0.05, len(self._state.round.bins)
        while not self.are_over():
            claim, self._held = self._held, None
            if claim is None or claim[0].index not in self._state.missing:
                claim = self._claim_fresh() or self._claim_returned()
            if claim is not None:
                if self.prefetches:
                    self._held = self._claim_fresh(num_bins)
                return *claim, self._held[0] if self._held is not None else None
            self._end_abandoned()
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
        check_rejects(self._state.stage, self._state.expected_in, self._state.rejects, self._state.num_in)
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

    def _claim_fresh(self, least: int = 1) -> tuple[Unit, int] | None:
        """Claim a unit that nobody has claimed: the next of this rank's bin, or the last of that with most cost left.

        Args:
            least: how many such units there have to be in all bins where none is left in the own one.
        """
        if not any(self._free):
            self._list_free()
        while True:
            own = self._free[self._rank.number] if self._rank.number < len(self._free) else []
            if not own and sum(map(len, self._free)) < least:
                return None
            number = self._rank.number
            if not own:
                number = max(range(len(self._free)), key=lambda bin: (bool(self._free[bin]), self._cost_left[bin]))
            index = self._free[number].pop(0 if own else -1)
            self._cost_left[number] -= self._state.units[index].cost
            is_fresh = index in self._state.missing and self._state.attempts.generation(index) == 0
            if is_fresh and self.make(index, 0):
                return self._state.units[index], 0
            self._num_losses += 1
            # To try units that others have claimed is work for the file system, and so is a list of all claims.
            if self._num_losses >= 16:
                self._list_free()

    def _list_free(self) -> None:
        attempts = self._state.attempts
        free = {index for index in self._state.missing - self._latest().keys() if attempts.generation(index) == 0}
        self._free = [[index for index in part if index in free] for part in self._state.round.bins]
        self._cost_left = [sum(self._state.units[index].cost for index in part) for part in self._free]
        self._num_losses = 0

    def _claim_returned(self) -> tuple[Unit, int] | None:
        """Claim a unit whose last attempt has failed or was given back, those that failed least often first.

        It is tried in this slot if that tells more than the attempts so far: others that have not tried it come first.
        """
        attempts = self._state.attempts
        returned = [index for index in self._state.missing if attempts.is_returned(index)]
        live = {slot for slot in self._state.live_slots() if not attempts.is_out(slot)} if returned else set[str]()
        for index in sorted(returned, key=lambda index: (len(attempts.failures(index)), index)):
            tried = {note.slot for note in attempts.failures(index)}
            if attempts.is_given_up(index, live) or (self._rank.slot in tried and not live <= tried):
                continue
            generation = attempts.generation(index)
            if self.make(index, generation):
                return self._state.units[index], generation
        return None

    def _end_abandoned(self) -> None:
        """Note the end of attempts whose ranks have ended, or whose heartbeats were not seen for a lease."""
        state, attempts = self._state, self._state.attempts
        latest = self._latest()
        records = {record.owner: record for record in read_progress(state.stage.ranks.progress)}
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
            for begun in attempts.open():
                if (begun.unit, begun.generation) == (index, generation):
                    attempts.end(
                        begun,
                        "failed",
                        f"its rank on {begun.slot} ended in the middle of it, or gave no heartbeat any more",
                    )
                    break
            else:
                claim = Note(kind="begun", slot=self._rank.slot, owner=owner, unit=index, generation=generation)
                attempts.end(claim, "released", "its rank ended before it began")

    def _latest(self) -> dict[int, int]:
        """Return the highest generation of the claims on each unit."""
        found: dict[int, int] = {}
        for path in self._folder.iterdir():
            unit, _, generation = path.name.partition(".")
            if unit.isdecimal() and generation.isdecimal():
                found[int(unit)] = max(found.get(int(unit), 0), int(generation))
        return found


class Replace(Exception):
    """The end of a rank in whose place a fresh process is to go on."""


def work(stage: StageRun, rank: Rank, on_change: Callable[[], object] = lambda: None) -> None:
    """Do units of a stage until it has ended, or until this slot is taken out of work.

    Args:
        on_change: is called about once a second in the middle of a unit, and after each.

    Raises:
        Replace: a fresh process is to go on.
        SharmillError: this rank can do nothing; others are told where that holds for them too.
    """
    _Worker(stage, rank, on_change).run()


class _Worker:
    """One rank at work: it loads the stage once, and attempts the units that it claims one after the other."""

    def __init__(self, stage: StageRun, rank: Rank, on_change: Callable[[], object]) -> None:
        self._stage = stage
        self._rank = rank
        self._on_change = on_change
        self._visibility = VisibilityTimeout(stage.options.seconds_until_seen)
        self._ledger = RecordLog(stage.ranks.ledger)
        self._failures_in_a_row = 0
        self._reported = 0.0

    def run(self) -> None:
        stage, rank = self._stage, self._rank
        wait_for_plan(stage, self._visibility)
        require_current(stage)
        interval = min(rank.beat_seconds, stage.options.lease_seconds / BEATS_PER_LEASE)
        path = stage.ranks.rank_progress(rank.owner)
        with ProgressWriter(path, rank.number, rank.slot, rank.owner, interval=interval) as self._progress:
            # The files in a folder may be seen later than the folder.
            self._state = self._visibility.retry_until_visible(
                lambda: StageState(stage, lambda: self._progress.last_beat)
            )
            try:
                self._do_units(Claims(self._state, rank))
            except FileNotFoundError:
                # The folders have gone with the plan.
                require_current(stage)
                raise
            except ImportError as error:
                problem = f"{stage.name}: on {socket.gethostname()}, {describe_import_error(error)}"
                missing = FatalError(problem, code="missing_package")
                self._note_error(missing)
                raise missing from error
            except SharmillError as error:
                self._note_error(error)
                raise

    def _do_units(self, claims: Claims) -> None:
        # Nothing is loaded where there is nothing to do.
        if claims.are_over():
            return
        stage, began = self._stage, time.monotonic()
        with (
            Staging(stage.root, stage.token, scratch_folder(stage.options.scratch)) as self._staging,
            closing(self._open()) as self._processor,
            closing(
                MetricsLog(stage.options.metrics, stage.name, stage.ranks.metrics, self._rank.number)
            ) as self._metrics,
        ):
            self._keep_to_one_kind()
            claims.prefetches = self._processor.prefetches
            log.info("rank %d is ready for %s on %s after %.1f s", self._rank.number, stage.name, self._rank.device,
                     time.monotonic() - began)  # fmt: skip
            # At once: its supervisor ends ranks that still load.
            self._progress.record.ready = time.time()
            self._progress.write()
            while (claim := claims.next()) is not None:
                self._attempt(*claim)
                self._on_change()

    def _open(self) -> Processor:
        """Load the model.

        Raises:
            DeviceError: it cannot be loaded on this device; others may do.
            ConfigError, FatalError: it cannot be loaded; other ranks would fare no better.
        """
        stage = self._stage
        try:
            self._check_node()
            declaration = stage.declaration
            if isinstance(declaration, WaitsForInput):
                seen = partial(declaration.input_visible, stage)
                self._visibility.wait_until(seen, f"{stage.name}: its input, as it was planned,")
            return self._visibility.retry_until_visible(lambda: declaration.open(stage, self._rank.device))
        except DeviceError as error:
            raise self._setup_error(str(error), error.code, error.place) from error
        except (ConfigError, FatalError, ImportError):
            raise
        except (Exception, SystemExit) as error:
            log.warning("rank %d cannot be set up", self._rank.number, exc_info=True)
            # What torch says of a device is a RuntimeError; whether the device or the model is to blame, the other
            # ranks find out.
            is_of_device = self._rank.device != "cpu" and isinstance(error, RuntimeError)
            raise self._setup_error(_with_type(error), "device_failed" if is_of_device else "setup_failed") from error

    def _check_node(self) -> None:
        if (found := self._stage.input) is not None:
            found.check_node()

    def _keep_to_one_kind(self) -> None:
        """Refuse a device of another kind than that of the first rank: its output would have other bits."""
        kind = self._processor.device_kind
        if not kind:
            return
        first = create_once(self._stage.ranks.device_kind, kind.encode()).decode(errors="replace")
        if first != kind:
            raise self._setup_error(
                f"the stage keeps to the kind of device of its beginning, {first}, and this is {kind}, whose output "
                "has other bits: run it there, or begin it anew with --restart",
                "other_device",
            )

    def _setup_error(self, reason: str, code: str, place: str = "") -> DeviceError:
        device = "the CPU" if self._rank.device == "cpu" else f"GPU {os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"
        place = place or f"{device} of {socket.gethostname()}"
        return DeviceError(
            f"{self._stage.name}: a rank cannot be set up on {place}: {reason}; see "
            f"{self._stage.dir.rank_log(self._rank.number)}",
            place=place,
            code=code,
        )

    def _attempt(self, unit: Unit, generation: int, following: Unit | None) -> None:
        """Try a unit once; the begin and the end are noted where all ranks see them.

        Args:
            following: the unit that will probably be next.

        Raises:
            Replace: this process may be unable to do any unit.
            SharmillError: the rank cannot go on.
        """
        log.info("unit %d begins: %d records, %.1f s of audio", unit.index, unit.size, unit.cost)
        attempts, slot, owner = self._state.attempts, self._rank.slot, self._rank.owner
        begun = Note(kind="begun", slot=slot, owner=owner, unit=unit.index, generation=generation)
        attempts.log.append(begun)
        attempts.add(begun)
        end = partial(attempts.end, begun)
        record = self._progress.record
        record.unit, record.unit_limit, record.unit_began = (
            unit.index,
            self._stage.options.time_limit(unit),
            time.time(),
        )
        self._processor.expect(following)
        began = time.monotonic()
        try:
            commit = self._visibility.retry_until_visible(lambda: self._commit(unit))
        except KeyboardInterrupt:
            end(*judge_leave(time.monotonic() - began, self._rank.job_seconds))
            raise
        except (ConfigError, FatalError, ImportError) as error:
            # The unit is not to blame. On a disk that takes no note, the error of the work is to be told.
            with suppress(SharmillError):
                end("released", str(error))
            raise
        except (Exception, SystemExit) as error:
            log.warning("unit %d failed", unit.index, exc_info=True)
            # What was removed with the plan fails in as many ways as there are files.
            require_current(self._stage)
            end("failed", _with_type(error), "".join(traceback.format_exception(error)))
            # It may be this process that is broken.
            self._failures_in_a_row += 1
            is_broken = is_device_error(error) or self._failures_in_a_row >= 2
            if is_broken and self._rank.is_replaced:
                log.warning("rank %d makes way for a fresh process", self._rank.number)
                raise Replace from None
            return
        finally:
            record.unit = None
            record.unit_cost_done = 0.0
        if commit is None:
            end("released", "another rank has published it")
            log.info("unit %d was published by another rank", unit.index)
            return
        self._failures_in_a_row = 0
        record.units_done += 1
        record.cost_done += unit.cost
        end("done")
        self._metrics.commit(unit, commit)
        log.info("unit %d is done in %.1f s: %d out, rejects %s", unit.index, commit.seconds, commit.num_out,
                 commit.rejects)  # fmt: skip

    def _commit(self, unit: Unit) -> Commit | None:
        """Process, publish and commit a unit, and return the commit, or None if another rank has published the unit."""
        require_current(self._stage)
        started = time.monotonic()
        take_delays()  # those of an attempt that failed
        try:
            with self._staging.write_errors(WRITE_ERRNOS):
                output = self._processor.process(unit, self._staging, partial(self._advance, unit))
            num_rejected = len(output.rejects)
            if output.num_out + num_rejected != unit.size:
                raise FatalError(
                    f"unit {unit.index}: {unit.size} records in, but {output.num_out} out and {num_rejected} rejected",
                    code="accounts",
                )
            if REASONS_OF_NODES & {reject.reason for reject in output.rejects}:
                self._check_node()
            self._state.look()
            if unit.index not in self._state.missing:
                return None
            with spent_on("disk"):
                files = self._staging.publish(output.files)
        finally:
            self._staging.clear()
        if output.rejects:
            lines = b"".join(reject.to_json() + b"\n" for reject in output.rejects)
            write_atomic(self._stage.ranks.unit_rejects(unit.index), lines, parents=False)
        if output.notes is not None:
            path = self._stage.ranks.notes_on(file.xxh3 for file in files)
            with open_atomic(path, parents=False) as stream:
                write_array(stream, output.notes.dtype, output.notes.shape, [output.notes])
        level = logging.WARNING if self._stage.rejects_keep_cut else logging.DEBUG
        for reject in output.rejects:
            log.log(level, "unit %d, rank %d on %s: %s of %s: %s", unit.index, self._rank.number, socket.gethostname(),
                    reject.reason, reject.record, reject.detail)  # fmt: skip
        asked = os.environ.get("SLURM_MEM_PER_NODE", "")
        commit = Commit(
            token=self._stage.token,
            index=unit.index,
            id=unit.id,
            files=files,
            num_in=unit.size,
            num_out=output.num_out,
            rejects=dict(sorted(Counter(reject.reason for reject in output.rejects).items())),
            stats=output.stats,
            seconds=round(time.monotonic() - started, 3),
            rank=self._rank.number,
            device_kind=self._processor.device_kind,
            delays=take_delays(),
            host=socket.gethostname(),
            memory_mb=round(peak_memory_mb()),
            memory_asked_mb=float(asked) if asked.isdecimal() else 0.0,
        )
        self._ledger.append(commit, synced=True)
        return commit

    def _advance(self, unit: Unit, cost: float) -> None:
        """Note that more of a unit is done; once a second, tell those who watch."""
        record = self._progress.record
        record.unit_cost_done = min(record.unit_cost_done + cost, unit.cost)
        if time.monotonic() - self._reported >= 1.0:
            self._reported = time.monotonic()
            self._on_change()

    def _note_error(self, error: SharmillError) -> None:
        """Note why this rank ends: what ends the stage for all, or what is wrong with its slot alone.

        Raises:
            FatalError: the plan is not the present one any more.
        """
        require_current(self._stage)
        if error.code == "superseded_plan":
            return
        note = Note(
            kind="failed" if isinstance(error, DeviceError) or error.code in _OF_SLOT else "stopped",
            slot=self._rank.slot,
            message=error.lines[0],
            details=list(error.lines[1:]),
            code=error.code,
            place=error.place if isinstance(error, DeviceError) else "",
            is_config=isinstance(error, ConfigError),
        )
        try:
            self._state.attempts.log.append(note)
        except SharmillError as failed:
            if self._rank.is_replaced:
                # For the supervisor this is not the end of a rank that has noted why.
                raise OSError(f"the end of the rank cannot be noted: {failed}") from failed
            log.warning("%s", failed)


def judge_leave(seconds: float, job_seconds: float | None) -> tuple[NoteKind, str]:
    """Return how an attempt has ended whose rank had to leave after so many seconds, and a sentence about it.

    It has failed if the unit had most of the time that any unit can have in a job.
    """
    left = f"its rank had to leave after {seconds:.0f} s"
    if job_seconds is None or seconds <= 0.5 * job_seconds:
        return "released", left
    remedy = "if the unit hangs, set executor.unit_time_limit to less; if it is slow, give jobs more time"
    return "failed", f"{left}, more than half of the time of a job: {remedy}"


def scratch_folder(scratch: str | None) -> Path | None:
    """Return the folder that ``executor.scratch`` names on this machine.

    Raises:
        DeviceError: there is none; other machines may have one.
    """
    if scratch is None:
        return None
    path = Path(os.path.expandvars(scratch))
    if not path.is_absolute() or not path.is_dir():
        host = socket.gethostname()
        raise DeviceError(
            f"executor.scratch {scratch} is no folder on {host}: it is {path}; name one that every node has",
            place=host,
            code="disk",
        )
    return path


def _with_type(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error, None)}"
