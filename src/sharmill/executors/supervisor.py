"""The supervisor: the small process that starts the ranks of one machine or job, and replaces those that die.

Ranks are forked from the server of multiprocessing, which makes their imports once for all. When the stage has ended
the supervisor ends ranks that do not leave, and then itself; so a frozen rank holds nobody up. If it is killed, the
server of its ranks ends, and with that they do.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final
from uuid import uuid4

from sharmill.engine.attempts import SETUP, AttemptLog, Note
from sharmill.engine.child import describe_exit, safe_path
from sharmill.engine.fence import require_current
from sharmill.engine.host import limit_cores, usable_cores
from sharmill.engine.progress import mark_ended, read_progress
from sharmill.engine.run_notes import require_not_cancelled
from sharmill.engine.stage import Stage
from sharmill.engine.state import StageState
from sharmill.engine.time_limit import find_limit
from sharmill.engine.work import Rank, Replace, ToldToLeave, end_attempt, was_most_of_job, work
from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.executors import preload
from sharmill.executors.devices import Device
from sharmill.executors.logs import logging_to, redirect_output
from sharmill.executors.signals import deferred_interrupts, ended_by_sigterm
from sharmill.staging import remove_dead_attempts

log = logging.getLogger(__name__)

# Exit statuses of ranks; any other is a crash, which the rank could not note itself.
_LEFT: Final = 0
_NOTED: Final = 70
_REPLACE: Final = 75
_PR_SET_PDEATHSIG: Final = 1
_SECONDS_BETWEEN_STARTS: Final = 0.5
# Of a frozen rank nothing tells that the stage has ended.
_MOST_SECONDS: Final = 10.0
_SECONDS_TO_LEAVE: Final = 30.0
_SECONDS_TO_END: Final = 2.0


@dataclass(frozen=True)
class RankStart:
    """Values that the process of a rank is started with.

    ``stage`` is pickled: it is unpacked, which imports its modules, once the log and the device are in place.
    """

    stage: bytes
    rank: Rank
    device: Device
    cores: int
    log: Path


@dataclass
class _Running:
    """A rank and its process."""

    rank: Rank
    process: BaseProcess


@dataclass
class Supervisor:
    """Runs ranks of a stage on devices of this machine until the stage has ended.

    Attributes:
        numbers: of the ranks, one for each device.
        job_seconds: the time limit of the job that this is, None where there is none.
        join_seconds: as that of ``StageState``.
        beat_seconds: the time between two heartbeats of a rank at most.
    """

    stage: Stage
    devices: Sequence[Device]
    numbers: Sequence[int]
    job_seconds: float | None = None
    join_seconds: float = 0.0
    beat_seconds: float = 15.0
    running: dict[int, _Running] = field(default_factory=dict)

    @property
    def error(self) -> SharmillError | None:
        """The reason why none of these ranks can work, None where one can."""
        attempts = self._state.attempts
        slots = [slot_of(number, device) for number, device in zip(self.numbers, self.devices, strict=True)]
        if not all(map(attempts.is_out, slots)):
            return None
        return attempts.all_out_error(self.stage.name, self.stage.dir.logs)

    def run(self) -> None:
        """Start ranks, and return when none is left.

        Raises:
            FatalError: the plan has been replaced or finished by another process, or a user has cancelled the run.
        """
        self._pickled = pickle.dumps(self.stage)
        self._state = StageState(self.stage, join_seconds=self.join_seconds)
        self._notes = AttemptLog(self.stage.dir.attempts)
        self._left: set[int] = set()
        self._frozen: set[int] = set()
        os.environ[preload.MODULES] = " ".join(self.stage.modules())
        os.environ[preload.PATH] = os.pathsep.join(sys.path)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload.__name__])
        try:
            ended_at: float | None = None
            while True:
                require_current(self.stage)
                require_not_cancelled(self.stage.run_dir)
                self._state.look()
                if not self._state.has_ended():
                    ended_at = None
                elif ended_at is None:
                    ended_at = time.monotonic()
                self._end_frozen()
                if ended_at is None:
                    self._start_missing()
                else:
                    self._end_late(ended_at)
                if not self.running and (ended_at is not None or not self._startable()):
                    return
                seconds = self.beat_seconds if self.running else _SECONDS_BETWEEN_STARTS
                wait([one.process.sentinel for one in self.running.values()], timeout=min(seconds, _MOST_SECONDS))
                for one in [one for one in self.running.values() if not one.process.is_alive()]:
                    self._remove(one)
        except FileNotFoundError:
            # The folders have gone with the plan.
            require_current(self.stage)
            raise
        finally:
            # Schedulers may send a second signal; how the ranks ended is noted before it counts.
            with deferred_interrupts():
                self._end(list(self.running.values()))

    def _startable(self) -> list[tuple[int, Device]]:
        """Return the ranks that may be started: they have not left, and their slots are not out."""
        return [
            (number, device)
            for number, device in zip(self.numbers, self.devices, strict=True)
            if number not in self._left and not self._state.attempts.is_out(slot_of(number, device))
        ]

    def _start_missing(self) -> None:
        """Start the ranks that may be, no more than there are units for."""
        for number, device in self._startable():
            if number not in self.running and len(self.running.keys() - self._frozen) < len(self._state.missing):
                self._start(number, device)

    def _start(self, number: int, device: Device) -> None:
        rank = Rank(
            number, slot_of(number, device), device.kind, uuid4().hex, self.job_seconds, self.join_seconds,
            beat_seconds=self.beat_seconds,
        )  # fmt: skip
        cores = max(1, usable_cores() // len(self.devices))
        start = RankStart(self._pickled, rank, device, cores, self.stage.dir.rank_log(rank.number))
        child = self._context.Process(target=rank_main, args=(start,), name=f"sharmill-rank-{rank.number}")
        try:
            with safe_path():
                child.start()
        except (OSError, EOFError) as error:
            self._note_setup(rank, f"could not be started: {type(error).__name__}: {error}")
        else:
            self.running[rank.number] = _Running(rank, child)

    def _remove(self, one: _Running, *, told: bool = False) -> None:
        """Note how a rank that has ended did so, if it could not itself; only then may others take its unit over."""
        one.process.join()
        del self.running[one.rank.number]
        self._frozen.discard(one.rank.number)
        if one.process.exitcode == _LEFT:
            self._left.add(one.rank.number)
        else:
            self._note_end(one.rank, one.process.exitcode, told=told)
        mark_ended(self.stage.dir.progress, {one.rank.owner})
        remove_dead_attempts(self.stage.root, self.stage.token)

    def _note_end(self, rank: Rank, status: int | None, *, told: bool) -> None:
        how = f"the rank process {describe_exit(status)}"
        log.warning("rank %d: %s", rank.number, how)
        self._state.look()
        open_attempts = [begun for begun in self._state.attempts.open() if begun.owner == rank.owner]
        for begun in open_attempts:
            if begun.unit not in self._state.missing:
                end_attempt(self._notes, self._state.attempts, begun, "done")
                continue
            message = f"{self._explain(begun, how)}; its log is {self.stage.dir.rank_log(rank.number)}"
            excused = told and not was_most_of_job(time.time() - begun.time, self.job_seconds)
            end_attempt(self._notes, self._state.attempts, begun, "released" if excused else "failed", message, message)
        if not open_attempts and status not in (_NOTED, _REPLACE) and not told:
            self._note_setup(rank, how)

    def _explain(self, begun: Note, how: str) -> str:
        limit = find_limit(self.stage.unit_time_limit, self._state.units[begun.unit])
        if limit is not None and time.time() - begun.time >= limit:
            return f"it took longer than executor.unit_time_limit of {limit:g} s"
        return how

    def _note_setup(self, rank: Rank, how: str) -> None:
        log.warning("rank %d %s", rank.number, how)
        note = Note(kind="failed", slot=rank.slot, unit=SETUP, message=how)
        self._notes.add(note)
        self._state.look()

    def _end_frozen(self) -> None:
        """Kill ranks that give no heartbeat any more; one that the kernel does not let end is not counted on."""
        records = {record.owner: record for record in read_progress(self.stage.dir.progress)}
        for number, one in self.running.items():
            record = records.get(one.rank.owner)
            # One that has ended is about to leave by itself.
            if number in self._frozen or record is None or record.ended:
                continue
            if self._state.is_dead(one.rank.owner, record):
                log.warning("rank %d gives no heartbeat any more and is killed", number)
                self._frozen.add(number)
                one.process.kill()

    def _end_late(self, ended_at: float) -> None:
        """End ranks that still load, at once, and those that have not left for a while."""
        ready = {record.owner for record in read_progress(self.stage.dir.progress) if record.ready}
        late = time.monotonic() - ended_at > _SECONDS_TO_LEAVE
        self._end([one for one in self.running.values() if late or one.rank.owner not in ready])

    def _end(self, ranks: Sequence[_Running]) -> None:
        """Tell ranks to leave, and end those that do not."""
        for one in ranks:
            one.process.terminate()
        deadline = time.monotonic() + _SECONDS_TO_END
        for one in ranks:
            one.process.join(max(0.0, deadline - time.monotonic()))
        for one in ranks:
            one.process.kill()
        for one in ranks:
            with suppress(FileNotFoundError):  # the folders may have gone with the plan
                self._remove(one, told=True)


def slot_of(number: int, device: Device) -> str:
    """Return the slot of a rank on this host."""
    place = f"GPU {device.visible} of rank" if device.visible else "rank"
    return f"{socket.gethostname()}/{place} {number}"


def supervise(
    connection: Connection, stage: bytes, numbers: Sequence[int], devices: Sequence[Device], log_file: Path
) -> None:
    """Run the supervisor of a local run in this process, which the run has started.

    Args:
        connection: the pipe to the run, to which an error goes that the run has to raise.
        stage: pickled.
        numbers: of the ranks, one for each device.
    """
    end_with_parent(signal.SIGTERM)
    try:
        redirect_output(log_file)
        with logging_to(log_file), ended_by_sigterm(ToldToLeave):
            Supervisor(pickle.loads(stage), devices, numbers, beat_seconds=1.0).run()
    except ToldToLeave:
        sys.exit(128 + signal.SIGTERM)
    except SharmillError as error:
        kind = ConfigError if isinstance(error, ConfigError) else FatalError
        connection.send(kind(error.lines[0], code=error.code, details=error.lines[1:]))


def rank_main(start: RankStart) -> None:
    """Run a rank, and end this process with a status that its supervisor understands.

    Ctrl-C, which reaches the whole group, is left to the run.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    _end_with_supervisor()
    start.device.restrict_environment()
    limit_cores(start.cores)
    redirect_output(start.log)
    with logging_to(start.log):
        status = _work(start)
    # Threads of libraries that hang at the end keep nobody waiting.
    os._exit(status)


def _work(start: RankStart) -> int:
    try:
        with ended_by_sigterm(ToldToLeave):
            work(pickle.loads(start.stage), start.rank)
    except Replace:
        return _REPLACE
    except ToldToLeave:
        log.warning("rank %d is told to leave", start.rank.number)
        return _REPLACE
    except SharmillError:
        log.warning("rank %d stops", start.rank.number, exc_info=True)
        return _NOTED
    except BaseException:
        log.exception("rank %d fails", start.rank.number)
        return 1
    return _LEFT


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, even in the middle of native code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _end_with_supervisor() -> None:
    """End this process when the supervisor is gone: whoever comes then has ranks of its own."""
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None

    def watch() -> None:
        supervisor.join()
        os._exit(1)

    threading.Thread(target=watch, name="watch-supervisor", daemon=True).start()
