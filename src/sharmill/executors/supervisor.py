"""The supervisor, which starts the ranks of one machine or job, replaces those that die and ends those that hang.

Ranks are forked from the server of multiprocessing, which makes their imports once for all. If the supervisor is
killed, the kernel ends that server, and with it the ranks.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from sharmill.engine.attempts import Note, NoteKind, end_attempt
from sharmill.engine.child import describe_exit, end_with_parent, safe_path
from sharmill.engine.claims import Rank
from sharmill.engine.fence import require_current, wait_for_plan
from sharmill.engine.patience import Patience
from sharmill.engine.progress import mark_ended, read_progress
from sharmill.engine.run_notes import require_not_cancelled
from sharmill.engine.stage import Stage
from sharmill.engine.state import StageState
from sharmill.engine.work import Replace, was_most_of_job, work
from sharmill.errors import SharmillError
from sharmill.executors.devices import VISIBLE, Device
from sharmill.executors.logs import logging_to, redirect_output
from sharmill.executors.signals import Terminated, deferred_interrupts, ended_by_sigterm
from sharmill.files.host import limit_cores, usable_cores
from sharmill.files.staging import remove_dead_attempts
from sharmill.files.stored import RecordLog

log = logging.getLogger(__name__)

# Exit statuses of ranks; with any other, a rank has not noted why it ends.
_LEFT: Final = 0
_NOTED: Final = 75
_SECONDS_TO_LEAVE: Final = 30.0
_SECONDS_TO_END: Final = 2.0
_SECONDS_TO_PRINT: Final = 0.5


def supervise_rank(
    stage: Stage, device: Device, number: int, *, job_seconds: float | None = None, beat_seconds: float = 15.0
) -> bool:
    """Run a rank of a stage that another process has planned, perhaps on another node; see ``Supervisor``."""
    wait_for_plan(stage, Patience(stage.seconds_until_seen))
    require_current(stage)
    with logging_to(stage.dir.driver_log):
        return Supervisor(stage, [device], [number], job_seconds=job_seconds, beat_seconds=beat_seconds).run()


@dataclass
class Supervisor:
    """Runs ranks of a stage on devices of this machine until the stage has ended.

    Attributes:
        numbers: of the ranks, one for each device.
        job_seconds: the time limit of the job that this is, None where there is none.
        beat_seconds: the time between two heartbeats of a rank at most, and between two looks at them.
    """

    stage: Stage
    devices: Sequence[Device]
    numbers: Sequence[int]
    job_seconds: float | None = None
    beat_seconds: float = 15.0

    def __post_init__(self) -> None:
        self._devices = dict(zip(self.numbers, self.devices, strict=True))
        self._slots = {number: device.slot(number) for number, device in self._devices.items()}
        self._state = StageState(self.stage)
        self._notes = RecordLog(self.stage.dir.attempts)
        self._idle = {*self.numbers}
        self._running: dict[BaseProcess, Rank] = {}

    def run(self, on_look: Callable[[], object] = lambda: None) -> bool:
        """Start ranks, and return when none is left: True if the stage has ended.

        Args:
            on_look: is called after each look at the stage.

        Raises:
            FatalError: the plan has been replaced or finished by another process, a user has cancelled the run, or
                the slots of all these ranks are taken out of work.
        """
        preloaded = [__name__, *self.stage.modules()], sys.path, str(self.stage.dir.driver_log)
        os.environ["SHARMILL_PRELOAD"] = json.dumps(preloaded)
        multiprocessing.set_forkserver_preload(["sharmill.executors.preload"])
        try:
            self._state.look()
            while not self._state.has_ended() and self._start_missing():
                self._wait_and_look(on_look)
                self._end_hanging()
            ready = {record.owner for record in read_progress(self.stage.dir.progress) if record.ready}
            self._end([process for process, rank in self._running.items() if rank.owner not in ready])
            leave_by = time.monotonic() + _SECONDS_TO_LEAVE
            while self._running and time.monotonic() < leave_by:
                self._wait_and_look(on_look)
            attempts, has_ended = self._state.attempts, self._state.has_ended()
            if not has_ended and all(map(attempts.is_out, self._slots.values())):
                raise attempts.all_out_error(self.stage.name, self.stage.dir.logs)
            return has_ended
        except FileNotFoundError:
            # The folders have gone with the plan.
            require_current(self.stage)
            raise
        finally:
            # Schedulers may send a second signal; how the ranks ended is noted before it counts.
            with deferred_interrupts():
                self._end([*self._running])
                _end_server()

    def _wait_and_look(self, on_look: Callable[[], object]) -> None:
        """Look at the stage when a rank has ended, or it is time."""
        wait([process.sentinel for process in self._running], timeout=self.beat_seconds)
        for process in [process for process in self._running if not process.is_alive()]:
            self._remove(process)
        require_current(self.stage)
        require_not_cancelled(self.stage.run_dir)
        self._state.look()
        on_look()

    def _start_missing(self) -> bool:
        """Start ranks, no more than there are units for, and return True while one runs or may be started.

        Those that have left, or whose slots are out of work, are not.
        """
        startable = [number for number in self._idle if not self._state.attempts.is_out(self._slots[number])]
        for number in startable:
            if len(self._running) < len(self._state.missing):
                self._start(number)
        return bool(self._running or startable)

    def _start(self, number: int) -> None:
        device = self._devices[number]
        rank = Rank(
            number,
            self._slots[number],
            device.kind,
            job_seconds=self.job_seconds,
            beat_seconds=self.beat_seconds,
        )
        cores = max(1, usable_cores() // len(self.devices))
        process = multiprocessing.get_context("forkserver").Process(
            target=run_rank,
            args=(pickle.dumps(self.stage), rank, device, cores, self.stage.dir.rank_log(number)),
            name=f"sharmill-rank-{number}",
        )
        try:
            with safe_path():
                process.start()
        except (OSError, EOFError) as error:
            message = f"could not be started: {type(error).__name__}: {error}"
            self._notes.append(Note(kind="failed", slot=rank.slot, message=message))
        else:
            self._running[process] = rank
            self._idle.remove(number)

    def _end_hanging(self) -> None:
        """Kill ranks that give no heartbeat any more, and those whose attempt takes longer than it may."""
        records = {record.owner: record for record in read_progress(self.stage.dir.progress)}
        attempts = {begun.owner: begun for begun in self._state.attempts.open()}
        for process, rank in list(self._running.items()):
            record, begun = records.get(rank.owner), attempts.get(rank.owner)
            limit = self.stage.time_limit(self._state.units[begun.unit]) if begun else None
            if begun and limit is not None and time.time() - begun.time > limit:
                why = f"it took longer than executor.unit_time_limit of {limit:g} s"
            elif record and not record.ended and self._state.is_dead(rank.owner, record):
                why = "the rank process gave no heartbeat any more"
            else:
                continue
            # It prints the stacks of its threads to its log, also where native code holds Python's lock.
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            process.join(_SECONDS_TO_PRINT)
            process.kill()
            self._remove(process, why)

    def _end(self, processes: Iterable[BaseProcess]) -> None:
        """Tell ranks to leave, and kill those that do not."""
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.kill()
            with suppress(FileNotFoundError):  # the folders may have gone with the plan
                self._remove(process, told=True)

    def _remove(self, process: BaseProcess, why: str = "", *, told: bool = False) -> None:
        """Note how a rank has ended, if it could not itself; only then may others take its unit over.

        Args:
            why: the reason for which it was killed.
            told: that it was told to leave, which excuses it.
        """
        process.join(_SECONDS_TO_END)
        if process.is_alive():
            return  # the kernel does not end what waits for a disk
        rank = self._running.pop(process)
        why = why or f"the rank process {describe_exit(process.exitcode)}"
        if process.exitcode != _LEFT:
            log.warning("rank %d: %s", rank.number, why)
            self._idle.add(rank.number)
        self._state.look()
        open_attempts = [begun for begun in self._state.attempts.open() if begun.owner == rank.owner]
        for begun in open_attempts:
            is_done = begun.unit not in self._state.missing
            excused = told and not was_most_of_job(time.time() - begun.time, self.job_seconds)
            kind: NoteKind = "done" if is_done else "released" if excused else "failed"
            message = f"{why}; its log is {self.stage.dir.rank_log(rank.number)}"
            end_attempt(self._notes, self._state.attempts, begun, kind, message, message)
        if not (open_attempts or told or process.exitcode in (_LEFT, _NOTED)):
            self._notes.append(Note(kind="failed", slot=rank.slot, message=why))
        mark_ended(self.stage.dir.progress, {rank.owner})
        remove_dead_attempts(self.stage.root, self.stage.token)


def _end_server() -> None:
    """End the process that ranks are forked from, with all that is left of them: the next stage has other imports."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def run_rank(stage: bytes, rank: Rank, device: Device, cores: int, log_file: Path) -> None:
    """Run a rank, and end this process with a status that its supervisor understands.

    Args:
        stage: pickled; to unpack it imports its modules, which need the log and the device to be in place.
    """
    # Ctrl-C, which reaches the whole group, is left to the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    os.environ[VISIBLE] = device.visible
    limit_cores(cores)
    redirect_output(log_file)
    status = _NOTED
    with logging_to(log_file):
        try:
            with ended_by_sigterm():
                work(pickle.loads(stage), rank)
            status = _LEFT
        except (Replace, Terminated, SharmillError):
            log.warning("rank %d stops", rank.number, exc_info=True)
        except BaseException:
            log.exception("rank %d fails", rank.number)
            status = 1
    # Threads of libraries that hang at the end keep nobody waiting.
    os._exit(status)
