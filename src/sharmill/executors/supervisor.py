"""Ranks as processes of this machine: their devices, their logs, and their supervisor.

The supervisor starts the ranks of one machine or job, replaces ranks that die, and kills ranks that hang. Ranks are
forked from multiprocessing's forkserver, which imports their modules once. If the supervisor is killed, the kernel ends
this server and the ranks. Every rank sees only its own GPU, if any, and logs to its own file in the run directory.
"""

import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from io import TextIOWrapper
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final, TextIO

import msgspec

from sharmill.engine.attempts import SETUP, Note, NoteKind, is_among
from sharmill.engine.fence import require_current, wait_for_plan
from sharmill.engine.launch import Launch, read_attempts
from sharmill.engine.parent import Rank
from sharmill.engine.progress import BEATS_PER_LEASE, RankProgress, mark_ended
from sharmill.engine.stage import StageRun
from sharmill.engine.watch import Watcher
from sharmill.engine.work import Replace, classify_exit, work
from sharmill.errors import ConfigError, PrintableFormatter, SharmillError, one_line
from sharmill.files.forks import ForkedProcess, ForkServer, end_with_server
from sharmill.files.host import (
    Terminated,
    deferred_interrupts,
    describe_exit,
    ended_by_sigterm,
    limit_cores,
    usable_cores,
)
from sharmill.files.output import open_log, redirect_output
from sharmill.files.record_log import RecordLog
from sharmill.files.shared_disk import VisibilityTimeout
from sharmill.files.staging import remove_dead_attempts, token_staging
from sharmill.files.stored import load_record

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Device and driver files of NVIDIA (on Linux, in containers, in WSL) and AMD.
_DRIVERS: Final = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# Exit statuses of ranks: no work left, or error noted. With any other status, the rank has not noted why it ended.
_LEFT: Final = 0
_NOTED: Final = 75
_SECONDS_TO_END: Final = 2.0
# The log handler of the current context, and the levels of the program's logger and of all open log files.
_log_of_context: Final = ContextVar[logging.Handler | None]("log", default=None)
_levels: Final[list[int]] = []
# Shortest time between two looks at the stage, in seconds, even if ranks complete many short units.
_LEAST_PAUSE: Final = 0.1
# Longest pause of an idle rank, in seconds. It can be long, because the supervisor wakes the rank when the state
# changes.
_MOST_PAUSE: Final = 300.0


@dataclass(frozen=True)
class Device:
    """The device of a rank.

    A CPU rank sees no GPU; otherwise every rank would allocate GPU memory through NeMo.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        visible: the only GPU that the rank may see, "" for none.
    """

    kind: str = "cpu"
    visible: str = ""

    @classmethod
    def given(cls, kind: str) -> "Device":
        """Return the device for the rank of a job: the first visible GPU if ``kind`` is ``cuda``, otherwise the CPU."""
        return cls(kind, os.environ.get(VISIBLE, "").split(",")[0] if kind == "cuda" else "")

    def slot(self, number: int) -> str:
        """Return the slot of a rank with this device on this host."""
        return f"{socket.gethostname()}/{f'GPU {self.visible} of rank' if self.visible else 'rank'} {number}"


@cache
def visible_gpus() -> tuple[str, ...]:
    """Return the identifiers of the GPUs that this process may use, in the form of ``CUDA_VISIBLE_DEVICES``.

    The result is cached, because a rank that runs inside this process hides the GPUs from torch later. If there is no
    GPU driver, torch is not imported.
    """
    if "torch" not in sys.modules and not any(Path(path).exists() for path in _DRIVERS):
        return ()
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    if count and named[0:1] and all(name.startswith("MIG-") for name in named):
        # torch counts only the first MIG instance in the list, but each rank gets an instance of its own.
        return tuple(named)
    return tuple(named[:count] if named else [str(number) for number in range(count)])


def usable_gpus(device: str) -> tuple[str, ...]:
    """Return the GPUs for the ranks that this process starts; ``device`` is the value of ``executor.device``.

    Raises:
        ConfigError: GPUs are required or were allocated to this job, but torch finds none.
    """
    if device == "cpu":
        return ()
    gpus = visible_gpus()
    if not gpus and (device == "cuda" or _gpus_are_given()):
        from sharmill.models.device import explain_missing

        wanted = "executor.device is cuda" if device == "cuda" else "this job was allocated GPUs"
        raise ConfigError(
            f"{wanted}, but no GPU can be used; to run without GPUs, set executor.device=cpu. {explain_missing()}",
            code="device_failed",
        )
    return gpus


def _gpus_are_given() -> bool:
    """Return True if the environment says that GPUs were allocated to this process."""
    if (named := os.environ.get(VISIBLE)) is not None:
        return named.split(",")[0].strip() not in ("", "-1", "NoDevFiles")
    # SLURM sets this variable for every job with GPUs.
    return os.environ.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0")


def plan_devices(workers: int | str, *, uses_gpu: bool, gpus: Sequence[str], cores: int) -> list[Device]:
    """Return the device of each rank. If there are more ranks than GPUs, they share the GPUs in turn.

    Args:
        workers: the number of ranks. ``auto`` means one rank per GPU if the stage uses GPUs and there are any,
            otherwise one rank per core.
    """
    places = [Device("cuda", gpu) for gpu in gpus] if uses_gpu and gpus else [Device()] * cores
    count = len(places) if workers == "auto" else int(workers)
    return [places[rank % len(places)] for rank in range(count)]


@contextmanager
def logging_to(path: Path, level: str = "INFO") -> Iterator[None]:
    """Also write this process's log records to ``path`` while the context lasts.

    Records of a thread that has its own log, such as a thread of another run, are written only to that log.

    Args:
        level: the lowest level of sharmill's own records.
    """
    stream = TextIOWrapper(open_log(path), encoding="utf-8")
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
        # Closing flushes the buffer, which fails again if the disk is full.
        with suppress(OSError):
            stream.close()


class _LogFile(logging.StreamHandler[TextIO]):
    """A log handler that ignores disk errors, because a unit that fails on a full disk reports them."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def pickle_stage(stage: StageRun) -> bytes:
    """Return a stage in pickled form, for ranks in other processes.

    Raises:
        ConfigError: the stage cannot be pickled.
    """
    try:
        return pickle.dumps(stage)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{stage.name} cannot be passed to other processes ({one_line(error)}): define the functions and classes "
            "in its settings at the top level of a module, and keep no open files, locks or lambdas in them",
            code="bad_config_value",
        ) from error


def supervise_rank(
    stage: StageRun, device: Device, number: int, *, job_seconds: float | None = None, beat_seconds: float = 15.0
) -> Watcher:
    """Run a rank of a stage that another process has planned, perhaps on another node; see ``Supervisor``.

    Returns:
        The watcher of this process, which may have led the stage.
    """
    visibility = VisibilityTimeout(stage.options.seconds_until_seen)
    wait_for_plan(stage, visibility)
    require_current(stage)
    with logging_to(stage.dir.driver_log, stage.options.log_level):
        watcher = Watcher(stage, number=number)
        # On a shared disk, the files in a folder may become visible later than the folder.
        visibility.retry_until_visible(watcher.look)
        try:
            # A leader must look several times per lease.
            beat_seconds = min(beat_seconds, stage.options.lease_seconds / BEATS_PER_LEASE)
            Supervisor(watcher, {number: device}, job_seconds=job_seconds, beat_seconds=beat_seconds).run()
        finally:
            watcher.close()
        return watcher


def _modules_of(stage: StageRun) -> list[str]:
    """Return the names of the modules that the forkserver imports for all ranks of this machine."""
    return [type(stage.declaration).__module__, *(stage.model.modules if stage.model is not None else ())]


@dataclass(eq=False)
class _Child:
    """A rank that runs in a child process.

    Attributes:
        progress: the last progress that the rank has reported, None if it has reported none.
        heard: the time of that report by ``time.monotonic``, which stops while the machine is suspended.
        unit_since: the time of the first report about the rank's present unit.
        is_open: False if the rank's end of the pipe is closed.
    """

    rank: Rank
    process: ForkedProcess
    pipe: Connection
    progress: RankProgress | None = None
    heard: float = field(default_factory=time.monotonic)
    unit_since: float = 0.0
    is_open: bool = True

    @property
    def is_idle(self) -> bool:
        """Return True if the rank has reported no unit in progress."""
        return self.progress is None or self.progress.unit is None

    def listen(self) -> bool:
        """Read the rank's reports; return True if its unit, its number of completed units or ``ready`` has changed."""
        before = self.progress
        try:
            while self.pipe.poll():
                self.progress = msgspec.json.decode(self.pipe.recv_bytes(), type=RankProgress)
                self.progress.written, self.heard = time.time(), time.monotonic()
        except (EOFError, OSError):
            self.is_open = False
        now = self.progress
        if now is not None and (before is None or (before.unit, before.generation) != (now.unit, now.generation)):
            self.unit_since = self.heard
        return now is not None and (
            before is None or (before.unit, before.units_done, before.ready) != (now.unit, now.units_done, now.ready)
        )

    def wake(self) -> None:
        """Make the rank look at the state of the stage."""
        with suppress(OSError):  # if the pipe is full, the rank will wake anyway
            self.pipe.send_bytes(b"")


@dataclass
class Supervisor:
    """Runs ranks of a stage on devices of this machine until the stage has ended.

    The supervisor is the parent process of the ranks. It monitors them through their exit statuses and the
    reports that they send through a pipe.

    Attributes:
        watcher: follows the stage, and may become its leader.
        devices: the devices of the ranks, by rank number.
        job_seconds: the time limit of this job; None if there is none.
        beat_seconds: the longest time between two checks of the stage, in seconds.
    """

    watcher: Watcher
    devices: Mapping[int, Device]
    job_seconds: float | None = None
    beat_seconds: float = 15.0

    def __post_init__(self) -> None:
        self.stage = self.watcher.stage
        self._launch = load_record(self.stage.ranks.launch, Launch).id
        self._slots = {number: device.slot(number) for number, device in self.devices.items()}
        # For each rank number without a process, the earliest time at which a rank may be started.
        self._idle = dict.fromkeys(self.devices, 0.0)
        self._children: list[_Child] = []
        self._looked = self._next_look = 0.0
        self._pickled = pickle_stage(self.stage)
        self._server = ForkServer([__name__, *_modules_of(self.stage)], self.stage.dir.driver_log)

    def run(self) -> bool:
        """Run ranks until none is left, and return True if the stage has ended.

        Raises:
            FatalError: the plan has been replaced or finished by another process, a user has cancelled the run, or
                the slots of all these ranks are excluded.
        """
        try:
            self.watcher.look()
            while not self.watcher.state.ended and self._start_missing():
                self._wait_and_look()
            # Ranks that are still loading can be ended at once, because they have no unit to release.
            self._end([child for child in self._children if child.progress is None or not child.progress.ready])
            leave_by = time.monotonic() + 30.0
            while self._children and time.monotonic() < leave_by:
                self._wait_and_look()
            state = self.watcher.state
            if not state.ended and all(is_among(slot, state.out) for slot in self._slots.values()):
                raise read_attempts(self.stage).all_excluded_error(self.stage.name, self.stage.dir.logs)
            return state.ended
        except FileNotFoundError:
            # If the plan was replaced and the folders were removed with it, report that rather than the missing file.
            require_current(self.stage)
            raise
        finally:
            # Schedulers may send a second signal; defer it until the end of the ranks is noted.
            with deferred_interrupts():
                self._end([*self._children])
                self._server.end()

    def _wait_and_look(self) -> None:
        """Wait for reports of ranks or for the next regular look, then look at the stage and kill ranks that hang."""
        pipes = [child.pipe for child in self._children if child.is_open]
        seconds = max(0.0, self._next_look - time.monotonic())
        wait([*pipes, *(child.process.sentinel for child in self._children)], timeout=seconds)
        has_news = False
        for child in [*self._children]:
            has_news |= child.listen()
            if child.progress is not None:
                self.watcher.tell(child.progress)
            if child.process.poll() is not None:
                has_news = True
                self._remove(child)
        if has_news:
            self._next_look = min(self._next_look, self._looked + _LEAST_PAUSE)
        if time.monotonic() >= self._next_look:
            self._looked = time.monotonic()
            self._next_look = self._looked + self.beat_seconds
            before = self.watcher.state
            self.watcher.look()
            for child in self._children if before != self.watcher.state else ():
                if child.is_idle:
                    child.wake()
            self._end_hanging()

    def _start_missing(self) -> bool:
        """Start ranks, at most one per missing unit, and return True if a rank is running or may be started later.

        Ranks in excluded slots are not started.
        """
        state = self.watcher.state
        startable = [number for number in self._idle if not is_among(self._slots[number], state.out)]
        for number in startable:
            if len(self._children) < state.num_missing and self._idle[number] <= time.monotonic():
                self._start(number)
        return bool(self._children or startable)

    def _start(self, number: int) -> None:
        device, stage = self.devices[number], self.stage
        rank = Rank(number, self._slots[number], device.kind, job_seconds=self.job_seconds, most_pause=_MOST_PAUSE)
        cores = max(1, usable_cores() // len(self.devices))
        pipe, its = Pipe()
        arguments = (
            self._pickled, rank, device, cores, stage.dir.rank_log(number), stage.options.log_level, its,
        )  # fmt: skip
        try:
            process = ForkedProcess(self._server, run_rank, arguments, f"sharmill-rank-{number}")
        except (OSError, EOFError) as error:
            pipe.close()
            self._note(rank, "failed", f"could not be started: {type(error).__name__}: {error}")
        else:
            os.set_blocking(pipe.fileno(), False)
            self._children.append(_Child(rank, process, pipe))
            del self._idle[number]
        finally:
            its.close()

    def _end_hanging(self) -> None:
        """Kill ranks that have stopped reporting, and ranks whose attempt exceeds its time limit."""
        for child in [*self._children]:
            if (progress := child.progress) is None:
                continue
            limit = progress.unit_limit
            if progress.unit is not None and limit is not None and time.monotonic() - child.unit_since > limit:
                why = f"it took longer than executor.unit_time_limit of {limit:g} s"
            elif time.monotonic() - child.heard > self.stage.options.lease_seconds:
                why = "the rank process stopped sending heartbeats"
            else:
                continue
            # The signal makes the rank print the stacks of its threads to its log, even if native code holds Python's
            # lock.
            with suppress(ProcessLookupError):
                os.kill(child.process.pid, signal.SIGUSR1)
            child.process.wait(0.5)
            child.process.kill()
            self._remove(child, why)

    def _end(self, children: Sequence[_Child]) -> None:
        """Tell ranks to stop, and kill the ranks that do not stop in time."""
        for child in children:
            child.process.terminate()
        deadline = time.monotonic() + _SECONDS_TO_END
        for child in children:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        for child in children:
            child.process.kill()
            with suppress(FileNotFoundError):  # the folders may have been removed together with the plan
                self._remove(child, told=True)

    def _remove(self, child: _Child, why: str = "", *, told: bool = False) -> None:
        """Remove a rank that has ended, and note its end if the rank has not, so that other ranks may take its unit.

        Args:
            why: the reason why it was killed.
            told: True if it was told to stop, so that its end does not count as a failure of the slot.
        """
        exitcode = child.process.wait(_SECONDS_TO_END)
        if exitcode is None:
            return  # a process that waits for a disk cannot be killed
        child.listen()
        child.pipe.close()
        self._children.remove(child)
        rank, progress = child.rank, child.progress
        why = why or f"the rank process {describe_exit(exitcode)}"
        if exitcode != _LEFT:
            log.warning("rank %d: %s", rank.number, why)
            # Start no replacement before the next look, since the leader may exclude the slot.
            self._idle[rank.number] = self._next_look
        if progress is not None and progress.unit is not None:
            kind: NoteKind = "failed"
            if told:
                kind, why = classify_exit(time.monotonic() - child.unit_since, self.job_seconds)
            words = f"{why}; see {self.stage.dir.rank_log(rank.number)}"
            self._note(rank, kind, words, progress.unit, progress.generation)
        elif not (told or exitcode in (_LEFT, _NOTED)):
            self._note(rank, "failed", why)
        else:
            mark_ended(self.stage.ranks.progress, rank.owner)
        remove_dead_attempts(token_staging(self.stage.root, self.stage.token))

    def _note(self, rank: Rank, kind: NoteKind, message: str, unit: int = SETUP, generation: int = 0) -> None:
        """Note the end of a rank in its log on its behalf, and write its last heartbeat."""
        records = RecordLog(self.stage.ranks.log(rank.owner), is_torn=True)
        note = Note(kind=kind, slot=rank.slot, launch=self._launch, owner=rank.owner, unit=unit, generation=generation,
                    message=message)  # fmt: skip
        records.append(note)
        mark_ended(self.stage.ranks.progress, rank.owner, size=records.size, record=rank.progress())


class _ToSupervisor:
    """The rank's connection to its supervisor: one end of a pipe."""

    interval = 1.0

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        # A supervisor that hangs must not block its ranks.
        os.set_blocking(pipe.fileno(), False)

    def tell(self, progress: RankProgress) -> None:
        with suppress(OSError):
            self._pipe.send_bytes(msgspec.json.encode(progress))

    def wait(self, seconds: float) -> None:
        with suppress(EOFError, OSError):
            if self._pipe.poll(seconds):
                self._pipe.recv_bytes()


def run_rank(
    stage: bytes, rank: Rank, device: Device, cores: int, log_file: Path, log_level: str, pipe: Connection
) -> None:
    """Run a rank, and end this process with an exit status for its supervisor.

    Args:
        stage: the pickled stage. Unpickling imports its modules, so the log and the device must be set up before.
    """
    # Ctrl-C reaches the whole process group, but only the main process handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_server()
    os.environ[VISIBLE] = device.visible
    limit_cores(cores)
    redirect_output(log_file)
    status = _NOTED
    with logging_to(log_file, log_level):
        try:
            with ended_by_sigterm():
                work(pickle.loads(stage), rank, _ToSupervisor(pipe))
            status = _LEFT
        except (Replace, Terminated, SharmillError):
            log.warning("rank %d stops", rank.number, exc_info=True)
        except BaseException:
            log.exception("rank %d failed", rank.number)
            status = 1
    # Exit without waiting for threads of libraries, which may hang.
    os._exit(status)
