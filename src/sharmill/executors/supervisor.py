"""Ranks as processes of this machine: their devices, their logs, and the supervisor.

The supervisor starts the ranks of one machine or job, replaces those that die and ends those that hang. They are forked
from a forkserver, which imports their modules once for all. If the supervisor is killed, the kernel ends that server,
and with it the ranks. Every rank sees only its own GPU, if any, and logs to its own file in the run directory.
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
# Files of the drivers of NVIDIA (on Linux, in containers, below Windows) and AMD.
_DRIVERS: Final = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# Exit statuses of ranks; with any other, a rank has not noted why it ends.
_LEFT: Final = 0
_NOTED: Final = 75
_SECONDS_TO_END: Final = 2.0
# The log that the running code is to write, and the levels of all open logs behind that of the program.
_log_of_context: Final = ContextVar[logging.Handler | None]("log", default=None)
_levels: Final[list[int]] = []
# Seconds between two looks at the stage, however many short units are done.
_LEAST_PAUSE: Final = 0.1
# A rank that has nothing to do is woken when the state changes.
_MOST_PAUSE: Final = 300.0


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
        # Closing tries once more to write what is left in the buffer.
        with suppress(OSError):
            stream.close()


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
) -> Watcher:
    """Run a rank of a stage that another process has planned, perhaps on another node; see ``Supervisor``.

    Returns: what this process knows of the stage in the end, which it may have led.
    """
    patience = VisibilityTimeout(stage.options.seconds_until_seen)
    wait_for_plan(stage, patience)
    require_current(stage)
    with logging_to(stage.dir.driver_log, stage.options.log_level):
        watcher = Watcher(stage, number=number)
        # The files in a folder may be seen later than the folder.
        patience.retry_until_visible(watcher.look)
        try:
            # A leader has to look more often than a lease is long.
            beat_seconds = min(beat_seconds, stage.options.lease_seconds / BEATS_PER_LEASE)
            Supervisor(watcher, {number: device}, job_seconds=job_seconds, beat_seconds=beat_seconds).run()
        finally:
            watcher.close()
        return watcher


def _modules_of(stage: StageRun) -> list[str]:
    """Return the names of the modules that a rank imports; the ranks of one machine import them once."""
    return [type(stage.declaration).__module__, *(stage.model.modules if stage.model is not None else ())]


@dataclass(eq=False)
class _Child:
    """A rank that runs in a child process.

    Attributes:
        progress: the last that it has said of itself, None before it has begun.
        heard: when that was, by ``time.monotonic``, which does not go on while the machine is suspended.
        unit_since: when it was first heard of its unit.
        is_open: it may say more.
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
        """Return True if it has no unit, as far as it has said."""
        return self.progress is None or self.progress.unit is None

    def listen(self) -> bool:
        """Read what the rank has said, and return True if it has another unit than before, or is ready now."""
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
        """Have the rank look at the state of the stage; what it cannot take it has been told already."""
        with suppress(OSError):
            self.pipe.send_bytes(b"")


@dataclass
class Supervisor:
    """Runs ranks of a stage on devices of this machine until the stage has ended.

    It knows its ranks as their parent does, by their exit statuses and by what they tell through a pipe.

    Attributes:
        watcher: what this looks at the stage with, which it may come to lead.
        devices: the devices of the ranks, by rank number.
        job_seconds: the time limit of this job, None if there is none.
        beat_seconds: the most time between two looks at the stage.
    """

    watcher: Watcher
    devices: Mapping[int, Device]
    job_seconds: float | None = None
    beat_seconds: float = 15.0

    def __post_init__(self) -> None:
        self.stage = self.watcher.stage
        self._launch = load_record(self.stage.ranks.launch, Launch).id
        self._slots = {number: device.slot(number) for number, device in self.devices.items()}
        # When a rank of each number that has none may be started.
        self._idle = dict.fromkeys(self.devices, 0.0)
        self._children: list[_Child] = []
        self._looked = self._next_look = 0.0
        self._pickled = pickle_stage(self.stage)
        self._server = ForkServer([__name__, *_modules_of(self.stage)], self.stage.dir.driver_log)

    def run(self) -> bool:
        """Start ranks, and return when none is left: True if the stage has ended.

        Raises:
            FatalError: the plan has been replaced or finished by another process, a user has cancelled the run, or
                the slots of all these ranks are taken out of work.
        """
        try:
            self.watcher.look()
            while not self.watcher.state.ended and self._start_missing():
                self._wait_and_look()
            # Ranks that still load have nothing to give back.
            self._end([child for child in self._children if child.progress is None or not child.progress.ready])
            leave_by = time.monotonic() + 30.0
            while self._children and time.monotonic() < leave_by:
                self._wait_and_look()
            state = self.watcher.state
            if not state.ended and all(is_among(slot, state.out) for slot in self._slots.values()):
                raise read_attempts(self.stage).all_excluded_error(self.stage.name, self.stage.dir.logs)
            return state.ended
        except FileNotFoundError:
            # The folders have gone with the plan.
            require_current(self.stage)
            raise
        finally:
            # Schedulers may send a second signal; how the ranks ended is noted before it counts.
            with deferred_interrupts():
                self._end([*self._children])
                self._server.end()

    def _wait_and_look(self) -> None:
        """Look at the stage when a rank has done something, or it is time, and end ranks that hang."""
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
        """Start ranks, no more than there are units for, and return True while one runs or may be started.

        Those that have left, or whose slots are out of work, are not.
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
        """Kill ranks that say nothing any more, and those whose attempt takes longer than it may."""
        for child in [*self._children]:
            if (progress := child.progress) is None:
                continue
            limit = progress.unit_limit
            if progress.unit is not None and limit is not None and time.monotonic() - child.unit_since > limit:
                why = f"it took longer than executor.unit_time_limit of {limit:g} s"
            elif time.monotonic() - child.heard > self.stage.options.lease_seconds:
                why = "the rank process gave no heartbeat any more"
            else:
                continue
            # It prints the stacks of its threads to its log, also where native code holds Python's lock.
            with suppress(ProcessLookupError):
                os.kill(child.process.pid, signal.SIGUSR1)
            child.process.wait(0.5)
            child.process.kill()
            self._remove(child, why)

    def _end(self, children: Sequence[_Child]) -> None:
        """Tell ranks to leave, and kill those that do not."""
        for child in children:
            child.process.terminate()
        deadline = time.monotonic() + _SECONDS_TO_END
        for child in children:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        for child in children:
            child.process.kill()
            with suppress(FileNotFoundError):  # the folders may have gone with the plan
                self._remove(child, told=True)

    def _remove(self, child: _Child, why: str = "", *, told: bool = False) -> None:
        """Note how a rank has ended, if it could not itself; only then may others take its unit over.

        Args:
            why: the reason for which it was killed.
            told: that it was told to leave, which excuses it.
        """
        exitcode = child.process.wait(_SECONDS_TO_END)
        if exitcode is None:
            return  # the kernel does not end what waits for a disk
        child.listen()
        child.pipe.close()
        self._children.remove(child)
        rank, progress = child.rank, child.progress
        why = why or f"the rank process {describe_exit(exitcode)}"
        if exitcode != _LEFT:
            log.warning("rank %d: %s", rank.number, why)
            # By then the leader may have seen that the slot is bad.
            self._idle[rank.number] = self._next_look
        if progress is not None and progress.unit is not None:
            kind: NoteKind = "failed"
            if told:
                kind, why = classify_exit(time.monotonic() - child.unit_since, self.job_seconds)
            words = f"{why}; its log is {self.stage.dir.rank_log(rank.number)}"
            self._note(rank, kind, words, progress.unit, progress.generation)
        elif not (told or exitcode in (_LEFT, _NOTED)):
            self._note(rank, "failed", why)
        else:
            mark_ended(self.stage.ranks.progress, rank.owner)
        remove_dead_attempts(token_staging(self.stage.root, self.stage.token))

    def _note(self, rank: Rank, kind: NoteKind, message: str, unit: int = SETUP, generation: int = 0) -> None:
        """Note how a rank has ended that could not do so itself, in its log, and give its last heartbeat."""
        records = RecordLog(self.stage.ranks.log(rank.owner), is_torn=True)
        note = Note(kind=kind, slot=rank.slot, launch=self._launch, owner=rank.owner, unit=unit, generation=generation,
                    message=message)  # fmt: skip
        records.append(note)
        mark_ended(self.stage.ranks.progress, rank.owner, size=records.size, record=rank.progress())


class _ToSupervisor:
    """The supervisor of a rank, as the rank has it: the other end of a pipe."""

    interval = 1.0

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        # A supervisor that stands still keeps nobody waiting.
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
    """Run a rank, and end this process with a status that its supervisor understands.

    Args:
        stage: pickled; to unpack it imports its modules, which need the log and the device to be in place.
    """
    # Ctrl-C, which reaches the whole group, is left to the run.
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
            log.exception("rank %d fails", rank.number)
            status = 1
    # Threads of libraries that hang at the end keep nobody waiting.
    os._exit(status)
