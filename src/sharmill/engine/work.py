"""The loop of a rank, the same for every executor: claim a unit, attempt it, commit it, until none is left.

It ends when the stage has ended: each unit is committed or given up, or an error ends it for all.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from sharmill.engine.attempts import FINAL_CODES, Note, NoteKind, end_attempt
from sharmill.engine.claims import Claims, Rank
from sharmill.engine.delays import spent_on, take_delays
from sharmill.engine.fence import require_current, wait_for_plan
from sharmill.engine.metrics import MetricsLog
from sharmill.engine.patience import Patience
from sharmill.engine.progress import BEATS_PER_LEASE, ProgressWriter, peak_memory_mb
from sharmill.engine.stage import Processor, Stage
from sharmill.engine.state import StageState
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import REASONS_OF_NODES, ConfigError, DeviceError, FatalError, SharmillError, is_device_error
from sharmill.files.staging import Staging
from sharmill.files.storage import WRITE_ERRNOS, create_atomic, write_atomic
from sharmill.files.stored import RecordLog, read_stored

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_REPORTS = 1.0
# A rank whose units fail one after the other may itself be what is broken, as after an error on its GPU.
_FAILURES_IN_A_ROW = 2
# Codes of errors that may be those of one slot alone; a full disk is one only if it is that of the node.
_OF_SLOT = FINAL_CODES - {"disk"}
# A unit that a rank was told to leave counts as failed if it had more than this of the time that any unit can have.
_MOST_OF_THE_TIME = 0.5


class Replace(Exception):
    """The end of a rank in whose place a fresh process is to go on."""


def work(stage: Stage, rank: Rank, on_change: Callable[[], object] = lambda: None) -> None:
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

    def __init__(self, stage: Stage, rank: Rank, on_change: Callable[[], object]) -> None:
        self._stage = stage
        self._rank = rank
        self._on_change = on_change
        self._patience = Patience(stage.seconds_until_seen)
        self._notes = RecordLog(stage.dir.attempts)
        self._ledger = RecordLog(stage.dir.ledger)
        self._failures_in_a_row = 0
        self._reported = 0.0

    def run(self) -> None:
        stage, rank = self._stage, self._rank
        wait_for_plan(stage, self._patience)
        require_current(stage)
        interval = min(rank.beat_seconds, stage.lease_seconds / BEATS_PER_LEASE)
        path = stage.dir.rank_progress(rank.owner)
        with ProgressWriter(path, rank.number, rank.slot, rank.owner, interval=interval) as self._progress:
            # The files in a folder may be seen later than the folder.
            self._state = self._patience.once_seen(lambda: StageState(stage, lambda: self._progress.last_beat))
            try:
                self._do_units(Claims(self._state, rank, self._notes))
            except FileNotFoundError:
                # The folders have gone with the plan.
                require_current(stage)
                raise
            except ImportError as error:
                message = f"{stage.name}: what every unit needs is not installed on {socket.gethostname()}"
                missing = FatalError(f"{message}: {_one_line(error)}", code="missing_package")
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
            Staging(stage.root, stage.token, scratch_folder(stage.scratch)) as self._staging,
            closing(self._open()) as self._processor,
            closing(MetricsLog(stage.metrics, stage.name, stage.dir.metrics, self._rank.number)) as self._metrics,
        ):
            self._keep_to_one_kind()
            seconds = time.monotonic() - began
            log.info("rank %d is ready for %s on %s after %.1f s", self._rank.number, stage.name, self._rank.device,
                     seconds)  # fmt: skip
            # At once: its supervisor ends ranks that still load.
            self._progress.record.ready = True
            self._progress.write()
            while (claim := claims.next()) is not None:
                self._attempt(*claim, claims.expected)
                self._on_change()

    def _open(self) -> Processor:
        """Load the model.

        Raises:
            DeviceError: it cannot be loaded on this device; others may do.
            ConfigError, FatalError: it cannot be loaded; other ranks would fare no better.
        """
        stage = self._stage
        try:
            stage.check_node()
            self._patience.wait_until(stage.sees_input, f"{stage.name}: its input, as it was planned,")
            return self._patience.once_seen(lambda: stage.open(self._rank.device))
        except DeviceError as error:
            raise self._setup_error(str(error), error.code, error.place) from error
        except (ConfigError, FatalError, ImportError):
            raise
        except (Exception, SystemExit) as error:
            log.warning("rank %d cannot be set up", self._rank.number, exc_info=True)
            # What torch says of a device is a RuntimeError; whether the device or the model is to blame, the other
            # ranks find out.
            is_of_device = self._rank.device != "cpu" and isinstance(error, RuntimeError)
            raise self._setup_error(_one_line(error), "device_failed" if is_of_device else "setup_failed") from error

    def _keep_to_one_kind(self) -> None:
        """Refuse a device of another kind than that of the first rank: its output would have other bits."""
        kind, path = self._processor.device_kind, self._stage.dir.device_kind
        if not kind:
            return
        try:
            create_atomic(path, kind.encode())
        except FileExistsError:
            if (first := read_stored(path).decode(errors="replace")) != kind:
                reason = (
                    f"the stage keeps to the kind of device of its beginning, {first}, and this is {kind}, whose "
                    "output has other bits: run it there, or begin it anew with --restart"
                )
                raise self._setup_error(reason, "other_device") from None

    def _setup_error(self, reason: str, code: str, place: str = "") -> DeviceError:
        device = "the CPU" if self._rank.device == "cpu" else f"GPU {os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"
        place = place or f"{device} of {socket.gethostname()}"
        log = self._stage.dir.rank_log(self._rank.number)
        message = f"{self._stage.name}: a rank cannot be set up on {place}: {reason}; see {log}"
        return DeviceError(message, place=place, code=code)

    def _attempt(self, unit: Unit, generation: int, following: Unit | None) -> None:
        """Try a unit once; the begin and the end are noted where all ranks see them.

        Args:
            following: the unit that will probably be next.

        Raises:
            Replace: this process may be unable to do any unit.
            SharmillError: the rank cannot go on.
        """
        log.info("unit %d begins: %d records, %.1f s of audio", unit.index, unit.size, unit.cost)
        slot, owner = self._rank.slot, self._rank.owner
        begun = Note(kind="begun", slot=slot, owner=owner, unit=unit.index, generation=generation)
        self._notes.append(begun)
        self._state.attempts.add(begun)
        end = partial(end_attempt, self._notes, self._state.attempts, begun)
        record = self._progress.record
        record.unit, record.unit_limit, record.unit_began = unit.index, self._stage.time_limit(unit), time.time()
        self._processor.expect(following)
        began = time.monotonic()
        try:
            commit = self._patience.once_seen(lambda: self._commit(unit))
        except KeyboardInterrupt:
            spent = time.monotonic() - began
            kind: NoteKind = "failed" if was_most_of_job(spent, self._rank.job_seconds) else "released"
            end(kind, f"its rank had to leave after {spent:.0f} s")
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
            end("failed", _one_line(error), "".join(traceback.format_exception(error)))
            self._make_way_if_broken(error)
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

    def _make_way_if_broken(self, error: BaseException) -> None:
        """Raise Replace if it may be this process that is broken, after an attempt that has failed."""
        self._failures_in_a_row += 1
        is_broken = is_device_error(error) or self._failures_in_a_row >= _FAILURES_IN_A_ROW
        if is_broken and self._rank.is_replaced:
            log.warning("rank %d makes way for a fresh process", self._rank.number)
            raise Replace from None

    def _commit(self, unit: Unit) -> Commit | None:
        """Process, publish and commit a unit, and return the commit, or None if another rank has published the unit."""
        require_current(self._stage)
        started = time.monotonic()
        take_delays()  # those of an attempt that failed
        try:
            with self._staging.write_errors(WRITE_ERRNOS):
                output = self._processor.process(unit, self._staging, partial(self._advance, unit))
            output.check_accounts(unit)
            if REASONS_OF_NODES & {reject.reason for reject in output.rejects}:
                self._stage.check_node()
            if not self._state.is_missing(unit):
                return None
            with spent_on("disk"):
                files = self._staging.publish(output.files)
        finally:
            self._staging.clear()
        if output.rejects:
            lines = b"".join(reject.to_json() + b"\n" for reject in output.rejects)
            write_atomic(self._stage.dir.unit_rejects(unit.index), lines, parents=False)
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
        if time.monotonic() - self._reported >= _SECONDS_BETWEEN_REPORTS:
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
            self._notes.append(note)
        except SharmillError as failed:
            if self._rank.is_replaced:
                # For the supervisor this is not the end of a rank that has noted why.
                raise OSError(f"the end of the rank cannot be noted: {failed}") from failed
            log.warning("%s", failed)


def was_most_of_job(seconds: float, job_seconds: float | None) -> bool:
    """Return True if a unit had most of the time that any unit can have in a job, and did not end."""
    return job_seconds is not None and seconds > _MOST_OF_THE_TIME * job_seconds


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
        message = f"executor.scratch {scratch} is no folder on {host}: it is {path}; name one that every node has"
        raise DeviceError(message, place=host, code="disk")
    return path


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
