"""The loop of a rank, the same for every executor: claim a unit, attempt it, commit it, and repeat.

The loop ends when the stage has ended, because each unit is committed or given up, or because of an error.
"""

import logging
import os
import socket
import time
import traceback
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from sharmill.engine.attempts import FINAL_CODES, Note, NoteKind
from sharmill.engine.claims import Claims
from sharmill.engine.curves import MetricsLog
from sharmill.engine.delays import spent_on, take_delays
from sharmill.engine.fence import require_current
from sharmill.engine.parent import Parent, Rank
from sharmill.engine.progress import BEATS_PER_LEASE, ProgressWriter, peak_memory_mb
from sharmill.engine.run_dir import stored_fields
from sharmill.engine.stage import Processor, StageRun, WaitsForInput
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
from sharmill.files.disk import WRITE_ERRNOS
from sharmill.files.record_log import RecordLog
from sharmill.files.shared_disk import VisibilityTimeout
from sharmill.files.staging import Staging
from sharmill.files.stored import create_once
from sharmill.registry import describe_import_error

log = logging.getLogger(__name__)

# Codes of errors that may concern only one slot. "disk" is left out, because a full shared disk concerns all slots; a
# full disk of a single node raises DeviceError.
_SLOT_ERROR_CODES = FINAL_CODES - {"disk"}


class Replace(Exception):
    """Raised by a rank that must be replaced by a fresh process."""


def work(stage: StageRun, rank: Rank, parent: Parent) -> None:
    """Process units of a stage until the stage has ended, or until the slot of this rank is excluded.

    Args:
        parent: the process that has started the rank.

    Raises:
        Replace: a fresh process must replace this one.
        SharmillError: this rank cannot do any work; the error is noted for the leader.
    """
    _Worker(stage, rank, parent).run()


class _Worker:
    """One rank at work: it loads the stage once, then claims and attempts units one after the other."""

    def __init__(self, stage: StageRun, rank: Rank, parent: Parent) -> None:
        self._stage = stage
        self._rank = rank
        self._parent = parent
        self._visibility = VisibilityTimeout(stage.options.seconds_until_seen)
        self._log = RecordLog(stage.ranks.log(rank.owner))
        self._failures_in_a_row = 0
        self._reported = 0.0

    def run(self) -> None:
        stage, rank = self._stage, self._rank
        require_current(stage)
        interval = stage.options.lease_seconds / BEATS_PER_LEASE
        progress = ProgressWriter(
            stage.ranks.progress, rank.progress(), interval=interval, tell=self._parent.tell,
            tell_interval=self._parent.interval,
        )  # fmt: skip
        with progress as self._progress:
            try:
                # On a shared disk, the files in a folder may become visible later than the folder.
                self._claims = self._visibility.retry_until_visible(lambda: Claims(stage, rank, self._parent))
                self._do_units()
            except FileNotFoundError:
                # If the plan was replaced and the folders were removed with it, report that rather than the missing
                # file.
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

    def _do_units(self) -> None:
        # Do not load a model if no work is left.
        if self._claims.is_finished():
            return
        stage, began = self._stage, time.monotonic()
        with (
            Staging(stage.root, stage.token, scratch_folder(stage.options.scratch)) as self._staging,
            closing(self._open()) as self._processor,
            closing(
                MetricsLog(stage.options.metrics, stage.name, stage.ranks.metrics, self._rank.number)
            ) as self._metrics,
        ):
            self._require_same_device_kind()
            log.info("rank %d is ready for %s on %s after %.1f s", self._rank.number, stage.name, self._rank.device,
                     time.monotonic() - began)  # fmt: skip
            # Write the time at once: when the stage ends, the supervisor immediately ends ranks that seem to be
            # loading.
            self._progress.record.ready = time.time()
            self._progress.write_soon(self._log.size)
            while (claim := self._claims.next()) is not None:
                self._attempt(*claim)
                self._parent.wait(0.0)

    def _open(self) -> Processor:
        """Load the model.

        Raises:
            DeviceError: the model cannot be loaded on this device, but perhaps on other devices.
            ConfigError, FatalError: it cannot be loaded, and no other rank could load it either.
        """
        stage = self._stage
        try:
            self._check_node()
            declaration = stage.declaration
            if isinstance(declaration, WaitsForInput):
                seen = partial(declaration.input_visible, stage)
                self._visibility.wait_until(seen, f"the planned input of {stage.name}")
            return self._visibility.retry_until_visible(lambda: declaration.open(stage, self._rank.device))
        except DeviceError as error:
            raise self._setup_error(str(error), error.code, error.place) from error
        except (ConfigError, FatalError, ImportError):
            raise
        except (Exception, SystemExit) as error:
            log.warning("rank %d cannot be set up", self._rank.number, exc_info=True)
            # torch raises a RuntimeError for errors of a device. If the model is to blame instead, other ranks fail as
            # well.
            may_be_device = self._rank.device != "cpu" and isinstance(error, RuntimeError)
            raise self._setup_error(_with_type(error), "device_failed" if may_be_device else "setup_failed") from error

    def _check_node(self) -> None:
        if (found := self._stage.input) is not None:
            found.check_node()

    def _require_same_device_kind(self) -> None:
        """Raise DeviceError if the first rank had another kind of device, because the output would differ."""
        kind = self._processor.device_kind
        if not kind:
            return
        first = create_once(self._stage.ranks.device_kind, kind.encode()).decode(errors="replace")
        if first != kind:
            raise self._setup_error(
                f"the stage was started on {first}, and this device, {kind}, produces different bits; use the same "
                "kind of device, or start the stage over with --restart",
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
        """Attempt a unit once, and note its start and its end.

        Args:
            following: the unit that will probably be next.

        Raises:
            Replace: this process may be unable to process any unit.
            SharmillError: the rank cannot continue.
        """
        log.info("unit %d starts: %d records, %.1f s of audio", unit.index, unit.size, unit.cost)
        record, began = self._progress.record, time.monotonic()
        record.unit, record.generation, record.unit_began = unit.index, generation, time.time()
        record.unit_limit = self._stage.options.time_limit(unit)
        # The parent must know the unit, to note the failure if the attempt kills this process.
        self._parent.tell(record)
        end = partial(self._end, unit.index, generation)
        self._processor.expect(following)
        try:
            commit = self._visibility.retry_until_visible(lambda: self._commit(unit, generation))
        except KeyboardInterrupt:
            end(*classify_exit(time.monotonic() - began, self._rank.job_seconds))
            raise
        except (ConfigError, FatalError, ImportError) as error:
            # The unit is not to blame. If this note cannot be written, the original error is still raised.
            with suppress(SharmillError):
                end("released", str(error))
            raise
        except (Exception, SystemExit) as error:
            log.warning("unit %d failed", unit.index, exc_info=True)
            # If the plan was replaced and its files were removed, do not blame the unit.
            require_current(self._stage)
            end("failed", _with_type(error), "".join(traceback.format_exception(error)))
            # A device error or two failures in a row suggest that this process is broken.
            self._failures_in_a_row += 1
            is_broken = is_device_error(error) or self._failures_in_a_row >= 2
            if is_broken and self._rank.is_replaced:
                log.warning("rank %d will be replaced by a fresh process", self._rank.number)
                raise Replace from None
            return
        finally:
            record.unit = None
            record.unit_cost_done = 0.0
            self._progress.write_soon(self._log.size)
        if commit is None:
            log.info("unit %d was taken over by another rank", unit.index)
            return
        self._failures_in_a_row = 0
        record.units_done += 1
        record.cost_done += unit.cost
        self._metrics.commit(unit, commit)
        log.info("unit %d finished in %.1f s: %d kept, rejected: %s", unit.index, commit.seconds, commit.num_out,
                 commit.rejects)  # fmt: skip

    def _end(self, unit: int, generation: int, kind: NoteKind, message: str, traceback: str = "") -> None:
        """Write a note about an attempt that ended without a commit."""
        note = Note(
            kind=kind, slot=self._rank.slot, launch=self._claims.launch.id, owner=self._rank.owner, unit=unit,
            generation=generation, message=message, traceback=traceback,
        )  # fmt: skip
        with suppress(FileNotFoundError):  # the folder may have been removed together with the plan
            self._log.append(note)

    def _commit(self, unit: Unit, generation: int) -> Commit | None:
        """Process, publish and commit a unit; return the commit, or None if another rank has taken over the unit."""
        started = time.monotonic()
        take_delays()  # discard the delays of an attempt that failed
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
            if self._claims.is_taken(unit.index, generation):
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
            slot=self._rank.slot,
            launch=self._claims.launch.id,
            time=time.time(),
            memory_mb=round(peak_memory_mb() + self._processor.memory_mb),
            memory_asked_mb=float(asked) if asked.isdecimal() else 0.0,
        )
        self._log.append(commit, synced=True)
        return commit

    def _advance(self, unit: Unit, cost: float) -> None:
        """Add ``cost`` to the progress of a unit; once a second, let the parent look at the stage."""
        record = self._progress.record
        record.unit_cost_done = min(record.unit_cost_done + cost, unit.cost)
        if time.monotonic() - self._reported >= 1.0:
            self._reported = time.monotonic()
            self._parent.wait(0.0)

    def _note_error(self, error: SharmillError) -> None:
        """Note the error that ends this rank, as an error that stops the stage or as one that concerns only this slot.

        Raises:
            FatalError: the plan has been replaced.
        """
        require_current(self._stage)
        if error.code == "superseded_plan":
            return
        is_of_slot = isinstance(error, DeviceError) or error.code in _SLOT_ERROR_CODES
        kind: NoteKind = "failed" if is_of_slot else "stopped"
        note = Note(
            kind=kind, slot=self._rank.slot, launch=self._claims.launch.id, owner=self._rank.owner,
            **stored_fields(error),
        )  # fmt: skip
        try:
            self._log.append(note)
            self._progress.write_soon(self._log.size)
        except SharmillError as failed:
            if self._rank.is_replaced:
                # An error that is not a SharmillError tells the supervisor that this rank has not noted why it ended.
                raise OSError(f"cannot record the rank's error: {failed}") from failed
            log.warning("%s", failed)


def classify_exit(seconds: float, job_seconds: float | None) -> tuple[NoteKind, str]:
    """Return the kind and the text of a note about an attempt whose rank was told to stop after ``seconds``.

    The attempt counts as failed if it ran for more than half of the job's time limit.
    """
    left = f"its rank was told to stop after {seconds:.0f} s"
    if job_seconds is None or seconds <= 0.5 * job_seconds:
        return "released", left
    remedy = "if the unit hangs, lower executor.unit_time_limit; if it is slow, raise the time limit of jobs"
    return "failed", f"{left}, more than half of the time limit of a job: {remedy}"


def scratch_folder(scratch: str | None) -> Path | None:
    """Return the folder that ``executor.scratch`` names on this machine, or None if it is not set.

    Raises:
        DeviceError: this machine has no such folder, but other machines may have one.
    """
    if scratch is None:
        return None
    path = Path(os.path.expandvars(scratch))
    if not path.is_absolute() or not path.is_dir():
        host = socket.gethostname()
        raise DeviceError(
            f"executor.scratch {scratch} is not a folder on {host} (expanded: {path}); name a folder that exists on "
            "every node",
            place=host,
            code="disk",
        )
    return path


def _with_type(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error, None)}"
