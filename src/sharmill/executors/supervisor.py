"""Ranks as processes of this machine: their devices, their logs, and the supervisor.

The supervisor starts the ranks of one machine or job, replaces those that die and ends those that hang. They are forked
from a forkserver, which imports their modules once for all. If the supervisor is killed, the kernel ends that server,
and with it the ranks. Every rank sees only its own GPU, if any, and logs to its own file in the run directory.
"""

import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from io import TextIOWrapper
from multiprocessing.connection import wait
from pathlib import Path
from typing import BinaryIO, Final, TextIO

from sharmill.engine.fence import require_current, wait_for_plan
from sharmill.engine.progress import mark_ended
from sharmill.engine.stage import StageRun
from sharmill.engine.state import Note, NoteKind
from sharmill.engine.work import Rank, Replace, judge_leave, work
from sharmill.errors import ConfigError, PrintableFormatter, SharmillError, one_line
from sharmill.executors.rank_process import RankProcess, RankServer
from sharmill.executors.reporter import ProgressReporter
from sharmill.files.disk import stopping_errors
from sharmill.files.host import (
    Terminated,
    deferred_interrupts,
    describe_exit,
    end_with_parent,
    ended_by_sigterm,
    limit_cores,
    usable_cores,
)
from sharmill.files.shared_disk import VisibilityTimeout
from sharmill.files.staging import remove_dead_attempts, token_staging
from sharmill.files.stored import open_stored

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Files of the drivers of NVIDIA (on Linux, in containers, below Windows) and AMD.
_DRIVERS: Final = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# Exit statuses of ranks; with any other, a rank has not noted why it ends.
_LEFT: Final = 0
_NOTED: Final = 75
_SECONDS_TO_END: Final = 2.0
# The log that the running code is to write, and the levels of all open logs behind that of the program.
_log_of_context: Final = ContextVar[logging.Handler | None]("log", default=None)
_levels: Final[list[int]] = []


@dataclass(frozen=True)
class Device:
    """A rank's device: ``kind`` is ``cpu`` or ``cuda``, ``visible`` the only GPU that the rank may see, if any.

    One on the CPU sees none: NeMo would use the memory of one, from every core.
    """

    kind: str = "cpu"
    visible: str = ""

    @classmethod
    def given(cls, kind: str) -> "Device":
        """Return the device of a job that was given one: the first GPU that is visible, if it is to be one."""
        return cls(kind, os.environ.get(VISIBLE, "").split(",")[0] if kind == "cuda" else "")

    def slot(self, number: int) -> str:
        """Return the slot of a rank with this device on this host."""
        return f"{socket.gethostname()}/{f'GPU {self.visible} of rank' if self.visible else 'rank'} {number}"


@cache
def visible_gpus() -> tuple[str, ...]:
    """Return the identifiers of the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` would name them.

    Asked once: what a rank inline hides from torch is not to be counted. Where there is no driver of GPUs, torch is not
    imported to say so.
    """
    if "torch" not in sys.modules and not any(Path(path).exists() for path in _DRIVERS):
        return ()
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    if count and named[0:1] and all(name.startswith("MIG-") for name in named):
        # A process sees the first instance alone, whatever the list, and a rank has one.
        return tuple(named)
    return tuple(named[:count] if named else [str(number) for number in range(count)])


def usable_gpus(device: str) -> tuple[str, ...]:
    """Return the GPUs for ranks of this process where ``executor.device`` is ``device``.

    Raises:
        ConfigError: GPUs are asked for, or were given to this job, and torch finds none.
    """
    if device == "cpu":
        return ()
    gpus = visible_gpus()
    if not gpus and (device == "cuda" or _gpus_are_given()):
        from sharmill.models.device import explain_missing

        wanted = "executor.device is cuda" if device == "cuda" else "this job was given GPUs"
        raise ConfigError(
            f"{wanted}, and none can be used; executor.device=cpu runs without. {explain_missing()}",
            code="device_failed",
        )
    return gpus


def _gpus_are_given() -> bool:
    """Return True if the scheduler, or whoever started this process, has set GPUs aside for it."""
    if (named := os.environ.get(VISIBLE)) is not None:
        return named.split(",")[0].strip() not in ("", "-1", "NoDevFiles")
    # Set by SLURM where a job has some, whatever else it sets.
    return os.environ.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0")


def plan_devices(workers: int | str, *, uses_gpu: bool, gpus: Sequence[str], cores: int) -> list[Device]:
    """Return the device of every rank.

    ``workers`` is a number or ``auto``: one per GPU for a stage that uses them where there are any, else one per core.
    With more ranks than GPUs, ranks share them in turn.
    """
    places = [Device("cuda", gpu) for gpu in gpus] if uses_gpu and gpus else [Device()] * cores
    count = len(places) if workers == "auto" else int(workers)
    return [places[rank % len(places)] for rank in range(count)]


@contextmanager
def logging_to(path: Path, level: str = "INFO") -> Iterator[None]:
    """Send this process's log records to ``path`` as well, for as long as the context lasts.

    What a thread logs that has a log of its own, as that of another run has, is only written there.

    Args:
        level: the least level of sharmill's own records.
    """
    stream = TextIOWrapper(_open_log(path), encoding="utf-8")
    handler = _LogFile(stream)
    handler.addFilter(lambda record: _log_of_context.get() in (None, handler))
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    sharmill = logging.getLogger("sharmill")
    if not _levels:
        _levels.append(sharmill.level)
    _levels.append(logging.getLevelName(level))
    sharmill.setLevel(min(_levels[1:]))
    outer = _log_of_context.set(handler)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        _log_of_context.reset(outer)
        _levels.remove(logging.getLevelName(level))
        sharmill.setLevel(min(_levels[1:]) if len(_levels) > 1 else _levels.pop())
        # Closing tries once more to write what is left in the buffer.
        with suppress(OSError):
            stream.close()


def redirect_output(path: Path) -> None:
    """Send all that this process prints to the end of ``path``, and its stacks if it crashes or gets SIGUSR1."""
    sys.stdout.flush()
    sys.stderr.flush()
    with _open_log(path) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # A process that is killed does not flush: what it printed last is what one looks for.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def _open_log(path: Path) -> BinaryIO:
    with stopping_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_stored(path, append=True)


class _LogFile(logging.StreamHandler[TextIO]):
    """A log that a full disk ends quietly: the unit that meets it says so in one line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def pickle_stage(stage: StageRun) -> bytes:
    """Return a stage for ranks in other processes.

    Raises:
        ConfigError: it cannot be pickled.
    """
    try:
        return pickle.dumps(stage)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{stage.name} cannot be handed to other processes ({one_line(error)}): define functions and classes that "
            "its settings hold at the top of a module, and keep no open files, locks or lambdas in them",
            code="bad_config_value",
        ) from error


def supervise_rank(
    stage: StageRun, device: Device, number: int, *, job_seconds: float | None = None, beat_seconds: float = 15.0
) -> bool:
    """Run a rank of a stage that another process has planned, perhaps on another node; see ``Supervisor``."""
    wait_for_plan(stage, VisibilityTimeout(stage.options.seconds_until_seen))
    require_current(stage)
    with logging_to(stage.dir.driver_log, stage.options.log_level):
        reporter = ProgressReporter(stage)
        return Supervisor(reporter, {number: device}, job_seconds=job_seconds, beat_seconds=beat_seconds).run()


def _modules_of(stage: StageRun) -> list[str]:
    """Return the names of the modules that a rank imports; the ranks of one machine import them once."""
    return [type(stage.declaration).__module__, *(stage.model.modules if stage.model is not None else ())]


@dataclass
class Supervisor:
    """Runs ranks of a stage on devices of this machine until the stage has ended.

    Attributes:
        reporter: what this looks at the stage with.
        devices: the devices of the ranks, by rank number.
        job_seconds: the time limit of this job, None if there is none.
        beat_seconds: the most time between two heartbeats of a rank, and between two looks at them.
    """

    reporter: ProgressReporter
    devices: Mapping[int, Device]
    job_seconds: float | None = None
    beat_seconds: float = 15.0

    def __post_init__(self) -> None:
        self.stage = self.reporter.stage
        self._state = self.reporter.state
        self._slots = {number: device.slot(number) for number, device in self.devices.items()}
        self._idle = {*self.devices}
        self._running: dict[RankProcess, Rank] = {}
        self._pickled = pickle_stage(self.stage)
        self._server = RankServer([__name__, *_modules_of(self.stage)], self.stage.dir.driver_log)

    def run(self) -> bool:
        """Start ranks, and return when none is left: True if the stage has ended.

        Raises:
            FatalError: the plan has been replaced or finished by another process, a user has cancelled the run, or
                the slots of all these ranks are taken out of work.
        """
        try:
            self.reporter.look()
            while not self._state.has_ended() and self._start_missing():
                self._wait_and_look()
            ready = {record.owner for record in self.reporter.ranks if record.ready}
            self._end([process for process, rank in self._running.items() if rank.owner not in ready])
            leave_by = time.monotonic() + 30.0
            while self._running and time.monotonic() < leave_by:
                self._wait_and_look()
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
                self._server.end()

    def _wait_and_look(self) -> None:
        """Look at the stage when a rank has ended, or it is time, and end ranks that hang."""
        wait([process.sentinel for process in self._running], timeout=self.beat_seconds)
        for process in [process for process in self._running if process.poll() is not None]:
            self._remove(process)
        require_current(self.stage)
        self.reporter.look()
        self._end_hanging()

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
        device = self.devices[number]
        rank = Rank(
            number,
            self._slots[number],
            device.kind,
            job_seconds=self.job_seconds,
            beat_seconds=self.beat_seconds,
        )
        cores = max(1, usable_cores() // len(self.devices))
        arguments = (
            self._pickled, rank, device, cores, self.stage.dir.rank_log(number), self.stage.options.log_level,
        )  # fmt: skip
        try:
            process = RankProcess(self._server, run_rank, arguments, f"sharmill-rank-{number}")
        except (OSError, EOFError) as error:
            self._state.attempts.log.append(
                Note(kind="failed", slot=rank.slot, message=f"could not be started: {type(error).__name__}: {error}")
            )
        else:
            self._running[process] = rank
            self._idle.remove(number)

    def _end_hanging(self) -> None:
        """Kill ranks that give no heartbeat any more, and those whose attempt takes longer than it may."""
        records = {record.owner: record for record in self.reporter.ranks}
        attempts = {begun.owner: begun for begun in self._state.attempts.open()}
        for process, rank in list(self._running.items()):
            record, begun = records.get(rank.owner), attempts.get(rank.owner)
            limit = self.stage.options.time_limit(self._state.units[begun.unit]) if begun else None
            if begun and limit is not None and time.time() - begun.time > limit:
                why = f"it took longer than executor.unit_time_limit of {limit:g} s"
            elif record and not record.ended and self._state.is_dead(rank.owner, record):
                why = "the rank process gave no heartbeat any more"
            else:
                continue
            # It prints the stacks of its threads to its log, also where native code holds Python's lock.
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            process.wait(0.5)
            process.kill()
            self._remove(process, why)

    def _end(self, processes: Iterable[RankProcess]) -> None:
        """Tell ranks to leave, and kill those that do not."""
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.kill()
            with suppress(FileNotFoundError):  # the folders may have gone with the plan
                self._remove(process, told=True)

    def _remove(self, process: RankProcess, why: str = "", *, told: bool = False) -> None:
        """Note how a rank has ended, if it could not itself; only then may others take its unit over.

        Args:
            why: the reason for which it was killed.
            told: that it was told to leave, which excuses it.
        """
        exitcode = process.wait(_SECONDS_TO_END)
        if exitcode is None:
            return  # the kernel does not end what waits for a disk
        rank = self._running.pop(process)
        why = why or f"the rank process {describe_exit(exitcode)}"
        if exitcode != _LEFT:
            log.warning("rank %d: %s", rank.number, why)
            self._idle.add(rank.number)
        self.reporter.report_commits()
        open_attempts = [begun for begun in self._state.attempts.open() if begun.owner == rank.owner]
        for begun in open_attempts:
            kind: NoteKind = "failed"
            if told:
                kind, why = judge_leave(time.time() - begun.time, self.job_seconds)
            if begun.unit not in self._state.missing:
                kind = "done"
            self._state.attempts.end(begun, kind, f"{why}; its log is {self.stage.dir.rank_log(rank.number)}")
        if not (open_attempts or told or exitcode in (_LEFT, _NOTED)):
            self._state.attempts.log.append(Note(kind="failed", slot=rank.slot, message=why))
        mark_ended(self.stage.ranks.progress, {rank.owner})
        remove_dead_attempts(token_staging(self.stage.root, self.stage.token))


def run_rank(stage: bytes, rank: Rank, device: Device, cores: int, log_file: Path, log_level: str) -> None:
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
    with logging_to(log_file, log_level):
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
