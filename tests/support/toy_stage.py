"""A stage that misbehaves on request, for tests of engine and executors; importable by spawned ranks.

Nothing here is heavy to import, so that a rank starts in a fraction of a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import FailedAttempt, StageResult
from sharmill.engine.run import locked, run_stage
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import ConfigError, DeviceError, FatalError
from sharmill.executors.local import LocalExecutor
from sharmill.files.staging import Staging
from sharmill.files.stored import RecordLog
from sharmill.manifest import Reject

RECORDS_PER_UNIT = 3


class ToyStage(Stage):
    """Writes two files a unit below ``folder/out``. ``behaviour`` says by unit index what else happens, ``setup_does``
    what happens when it is opened; both are names of ``_do_...`` functions with an optional ``:argument``.

    A name that ends in ``_once`` happens at the first attempt only. Subclasses override ``load``, which is called in
    the rank before the first unit, and ``work``.
    """

    kind: ClassVar[str] = "toy"

    def __init__(
        self,
        folder: Path,
        *,
        units: int = 6,
        behaviour: dict[int, str] | None = None,
        everywhere: str = "",
        setup_does: str = "",
        option: Any = 1,
        lost_in_finalize: int = 0,
    ) -> None:
        self.run_dir = RunDir(folder / "run")
        self.root = folder / "out"
        self.folders = ("first", "last")
        self.marks = folder / "marks"
        self.units = units
        self.behaviour = behaviour or {}
        self.everywhere = everywhere
        self.setup_does = setup_does
        self.option = option
        self.lost_in_finalize = lost_in_finalize

    def identity(self) -> dict[str, Any]:
        return {"option": self.option, "units": self.units, "tuple": (1, 2), "list": [{"b": 1, "a": 2}]}

    def plan(self, folder: Path) -> Iterator[Unit]:
        self.mark("plan", str(os.getpid()))
        (folder / "beside.txt").write_text("beside the units")
        for index in range(self.units):
            if (self.marks / "die_in_plan").exists() and index == self.units // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield make_unit(index, cost=float(index % 4 + 1), size=RECORDS_PER_UNIT, params={"index": index})

    def open(self, device: str) -> Processor:
        self.load(device)
        return ToyProcessor(self)

    def load(self, device: str) -> None:
        self.mark("setup", f"{os.getpid()} {device}")
        self._misbehave(self.setup_does, "setup", None)

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        assert (self.dir.plan / "beside.txt").exists()
        self.mark("attempts", f"{unit.index} {os.getpid()}")
        first, last = f"first/{unit.index:06d}.txt", f"last/{unit.index:06d}.txt"
        staging.path(first).write_text(f"unit {unit.index}\n" * 2000)
        does = self.behaviour.get(unit.index, self.everywhere)
        output = self._misbehave(does, f"unit-{unit.index}", unit)
        staging.path(last).write_text(f"end of unit {unit.index}\n" * 2000)
        return output or Output(files=[first, last], num_out=unit.size, stats={"seconds": 3600.0})

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        parts = [self.root / file.name for commit in commits for file in commit.files[1:]]
        (self.root / "merged.txt").write_text("".join(part.read_text() for part in parts))
        totals = add_up(commits)
        return Totals(
            num_in=totals.num_in,
            num_out=totals.num_out - self.lost_in_finalize,
            rejects=totals.rejects,
            hours=totals.hours,
        )

    def discard(self) -> None:
        for name in ("first", "last"):
            for path in (self.root / name).glob("*"):
                path.unlink()
        (self.root / "merged.txt").unlink(missing_ok=True)

    def mark(self, name: str, line: str = "") -> None:
        """Adds a line to a file that the test reads; one write, so that ranks do not mix."""
        self.marks.mkdir(parents=True, exist_ok=True)
        with (self.marks / name).open("a") as stream:
            stream.write(line + "\n")

    def marked(self, name: str) -> list[str]:
        path = self.marks / name
        return path.read_text().splitlines() if path.exists() else []

    def attempts(self) -> Counter[int]:
        """Return the number of calls of ``work``, by unit index."""
        return Counter(int(line.split()[0]) for line in self.marked("attempts"))

    def pids(self) -> set[int]:
        return {int(line.split()[0]) for line in self.marked("setup")}

    def _misbehave(self, does: str, where: str, unit: Unit | None) -> Output | None:
        if not does:
            return None
        name, _, argument = does.partition(":")
        if name.endswith("_once"):
            if self.marked(f"once-{where}"):
                return None
            self.mark(f"once-{where}")
            name = name.removesuffix("_once")
        return globals()[f"_do_{name}"](self, unit, argument)


class ToyProcessor(Processor):
    """Cannot be pickled, as processors with a model in them."""

    def __init__(self, stage: ToyStage) -> None:
        self.stage = stage
        self.model = threading.Lock()

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        return self.stage.work(unit, staging, advance)


def _do_raise(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    raise ValueError(argument or "a bad day\nwith two lines")


def _do_kill(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    os.kill(os.getpid(), getattr(signal, argument or "SIGKILL"))


def _do_segfault(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    ctypes.string_at(0)


def _do_exit(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    os._exit(int(argument))


def _do_sysexit(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    sys.exit(int(argument))


def _do_memory(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    raise MemoryError("93 TiB are not to be had")


def _do_device(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")


def _do_cuda_memory(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    import torch

    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 19.00 GiB.")


def _do_no_engine(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    raise RuntimeError("GET was unable to find an engine to execute this computation")


def _do_cufft(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    raise RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR")


def _do_config(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    raise ConfigError("model 'x' is unknown; use 'y'", code="unknown_name")


class UnpicklableFatal(FatalError):
    """Cannot go through a pipe: it holds a generator and has an __init__ of its own."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}", code="disk")
        self.held = (character for character in first)


def _do_fatal(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    raise UnpicklableFatal("the disk is full", "that is that")


def _do_import(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    import no_such_module_at_all  # noqa: F401


def _do_print(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    print(argument)
    os.write(2, b"from native code\n")
    os.kill(os.getpid(), signal.SIGKILL)


def _do_miscount(stage: ToyStage, unit: Unit | None, argument: str) -> Output:
    return Output(files=[], num_out=RECORDS_PER_UNIT - 1)


def _do_reject(stage: ToyStage, unit: Unit | None, argument: str) -> Output:
    """``reasons`` joined by commas, one for each record that is rejected."""
    assert unit is not None
    rejects = [Reject("toy", reason, "for the test", {"unit": unit.index}) for reason in argument.split(",")]
    return Output(files=[], num_out=unit.size - len(rejects), rejects=rejects)


def _do_wait(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    """Computes until the file ``argument`` is among the marks, with pauses, as other threads have work too."""
    while not (stage.marks / argument).exists():
        sum(range(10_000))
        time.sleep(0.001)


def _do_hold_gil(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    """Native code that does not let any other thread run, for minutes."""
    stage.mark("holding")
    sum(range(10**12))


def _do_hang_at_exit(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()


def _do_environment(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    stage.mark("environment", f"{os.getpid()} {os.environ.get(argument)}")


def _do_die_after_commit(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    """The process dies when the record is on disk and before anybody hears of it."""

    append = RecordLog.append

    def append_and_die(log: RecordLog, record: msgspec.Struct, *, synced: bool = False) -> None:
        append(log, record, synced=synced)
        is_it = isinstance(record, Commit) and record.index == int(argument)
        if is_it and not stage.marked("died-after-commit"):
            stage.mark("died-after-commit")
            os.kill(os.getpid(), signal.SIGKILL)

    RecordLog.append = append_and_die  # type: ignore[method-assign]


def _do_one_is_slow(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    """Load without end, except in the rank that came first; both may be here at once."""
    if int(stage.marked("setup")[0].split()[0]) != os.getpid():
        time.sleep(600)


def _do_meet(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    """Waits until ``argument`` ranks are there."""
    wait_until(lambda: len(stage.pids()) >= int(argument))


def _do_fork_and_die(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    stage.mark("children", str(child))
    os.kill(os.getpid(), signal.SIGKILL)


class SleepyStage(ToyStage):
    """Takes its time over every unit."""

    lease_seconds = 30.0

    def __init__(self, *arguments: Any, seconds: float = 0.0, uses_gpu: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seconds = seconds
        self.resource = "gpu" if uses_gpu else "cpu"  # type: ignore[misc]

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        self.mark("begun", str(unit.index))
        if not (self.marks / "hurry").exists():
            time.sleep(self.seconds)
        return super().work(unit, staging, advance)

    def begun(self) -> Counter[int]:
        """How often each unit was begun."""
        return Counter(int(line) for line in self.marked("begun"))

    def redone(self) -> int:
        """How many attempts there were beyond one a unit."""
        return sum(self.begun().values()) - len(self.begun())


class GpuStage(ToyStage):
    resource = "gpu"


class Unloadable(ToyStage):
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("these are not the bytes")


class SlowStage(ToyStage):
    """Takes over two seconds for unit 0, and says every few milliseconds that it has got on."""

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        began = time.monotonic()
        while unit.index == 0 and time.monotonic() - began < 2.2:
            advance(unit.cost / 1000)
            time.sleep(0.01)
        return super().work(unit, staging, advance)


class GoesBlind(ToyStage):
    """The rank of unit 2 does not see the audio any more while it does that."""

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        if unit.index == 2 and not self.marked("blind"):
            self.mark("blind", str(os.getpid()))
            output = _do_reject(self, unit, "missing_audio")
            self.mark("attempts", f"2 {os.getpid()}")
            return output
        return super().work(unit, staging, advance)

    def check_node(self) -> None:
        if str(os.getpid()) in self.marked("blind"):
            raise DeviceError("this node does not see the audio", place="node a", code="unlike_nodes")


class DiesIdle(ToyStage):
    """The rank that did unit 0 dies when it has nothing more to do; unit 1 waits for that."""

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        if unit.index == 0:
            pid = os.getpid()
            self.mark("idle", str(pid))
            threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        else:
            wait_until(lambda: self.marked("idle") and not is_running(int(self.marked("idle")[0])))
        return super().work(unit, staging, advance)


class EndsTheForkServer(ToyStage):
    """Unit 1 ends the process that the ranks are forked from, once, and with it all of them."""

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        if unit.index == 1 and not self.marked("ended"):
            self.mark("ended", str(os.getppid()))
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return super().work(unit, staging, advance)


class DiesBesideAnIdleRank(ToyStage):
    """The rank of unit 1 dies when the other has done unit 0 and waits."""

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        if unit.index == 1 and not self.attempts()[1]:
            self.mark("attempts", f"1 {os.getpid()}")
            wait_until(lambda: any("unit 0 is done" in path.read_text() for path in self.dir.logs.glob("rank*")))
            time.sleep(0.3)  # what the driver has heard shows nowhere
            os.kill(os.getpid(), signal.SIGKILL)
        return super().work(unit, staging, advance)


@dataclass
class RecordingListener(Listener):
    """A listener that remembers."""

    done: list[int] = field(default_factory=list)
    failed: dict[int, FailedAttempt] = field(default_factory=dict)
    already: list[int] = field(default_factory=list)
    ended: list[StageResult] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    advanced: list[tuple[int, float]] = field(default_factory=list)

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        self.already = [commit.index for commit in done]

    def loading(self, num_ranks: int) -> None:
        self.loads.append(num_ranks)

    def unit_advanced(self, unit: Unit, done: float) -> None:
        self.advanced.append((unit.index, done))

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        self.done.append(unit.index)

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        self.ended.append(result)
        self.failed |= result.failures


def run(
    stage: ToyStage, workers: int = 1, *, max_reject_fraction: float = 0.5, restart: bool = False
) -> tuple[StageResult, RecordingListener]:
    """Runs the stage as the pipeline would."""
    heard = RecordingListener()
    with locked(stage.run_dir) as lock:
        result = run_stage(
            stage, LocalExecutor(workers), heard, max_reject_fraction=max_reject_fraction, restart=restart,
            unlocked=lock.released,
        )  # fmt: skip
    return result, heard


def output_bytes(stage: ToyStage) -> dict[str, bytes]:
    """All that lies in the output folder, by name."""
    return {
        path.relative_to(stage.root).as_posix(): path.read_bytes()
        for path in sorted(stage.root.rglob("*"))
        if path.is_file()
    }


def wait_until(condition: Any, seconds: float = 120.0) -> None:
    """Returns when ``condition()`` holds; fails the test if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return True if there is such a process that has not ended; a zombie has."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
