"""A stage that misbehaves on request, for tests of engine and executors, also as on GPUs that break; ranks import it.

Nothing here is heavy to import, so that a rank starts in a fraction of a second.
"""

import ctypes
import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from sharmill.engine.executor import Executor, Listener, StageResult
from sharmill.engine.run import locked, reserved, run_stage
from sharmill.engine.run_dir import RankFolders, RunDir, StageDir
from sharmill.engine.stage import Advance, Processor, Publication, RunOptions, Stage, StageRun
from sharmill.engine.unit import Commit, FailedAttempt, Output, Totals, Unit, add_up, make_unit
from sharmill.errors import ConfigError, DeviceError, FatalError
from sharmill.executors.local import LocalExecutor
from sharmill.files.host import usable_cores
from sharmill.files.staging import Staging
from sharmill.manifest import Reject

RECORDS_PER_UNIT = 3
ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
# Errors of a GPU after which nothing works in this process any more.
broken: list[Exception] = []


class ToyStage(Stage):
    """Writes two files a unit below ``folder/out``. ``behaviour`` says by unit index what else happens, ``setup_does``
    what happens when it is opened. Both are names of ``_ERRORS``, or of ``_do_...`` functions with an optional
    ``:argument``. Each unit takes ``seconds``, until there is a mark ``hurry``.

    A name that ends in ``_once`` happens at the first attempt only. Subclasses override ``load``, which is called in
    the rank before the first unit, and ``work``. ``limits`` are options of its run, which ``in_run`` returns.
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
        seconds: float = 0.0,
        **limits: Any,
    ) -> None:
        self.folder = folder
        self.root = folder / "out"
        self.limits = limits
        self.marks = folder / "marks"
        self.units = units
        self.behaviour = behaviour or {}
        self.everywhere = everywhere
        self.setup_does = setup_does
        self.option = option
        self.lost_in_finalize = lost_in_finalize
        self.seconds = seconds

    @property
    def in_run(self) -> StageRun:
        """The stage in its run, without the token of its plan, as the pipeline makes it."""
        options = RunOptions(**{"max_reject_fraction": 0.5} | self.limits)
        return StageRun(self, RunDir(self.folder / "run"), options=options)

    @property
    def run_dir(self) -> RunDir:
        return self.in_run.run_dir

    @property
    def dir(self) -> StageDir:
        return self.in_run.dir

    @property
    def ranks(self) -> RankFolders:
        return self.in_run.ranks

    def publication(self, run: StageRun) -> "ToyPublication":
        return ToyPublication(self.root)

    def identity(self, run: StageRun) -> dict[str, Any]:
        return {"option": self.option, "units": self.units, "tuple": (1, 2), "list": [{"b": 1, "a": 2}]}

    def plan(self, run: StageRun) -> Iterator[Unit]:
        self.mark("plan", str(os.getpid()))
        (run.plan_folder / "beside.txt").write_text("beside the units")
        for index in range(self.units):
            if (self.marks / "die_in_plan").exists() and index == self.units // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield make_unit(index, cost=float(index % 4 + 1), size=RECORDS_PER_UNIT, params={"index": index})

    def open(self, run: StageRun, device: str) -> Processor:
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
        if broken:
            raise broken[0]
        if not (self.marks / "hurry").exists():
            time.sleep(self.seconds)
        does = self.behaviour.get(unit.index, self.everywhere)
        output = self._misbehave(does, f"unit-{unit.index}", unit)
        staging.path(last).write_text(f"end of unit {unit.index}\n" * 2000)
        return output or Output(files=[first, last], num_out=unit.size, stats={"seconds": 3600.0})

    def finalize(self, run: StageRun) -> Totals:
        parts = [run.root / file.name for commit in run.commits for file in commit.files[1:]]
        (run.root / "merged.txt").write_text("".join(part.read_text() for part in parts))
        totals = add_up(run.commits)
        return Totals(
            num_in=totals.num_in,
            num_out=totals.num_out - self.lost_in_finalize,
            rejects=totals.rejects,
            hours=totals.hours,
        )

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

    def redone(self) -> int:
        """Return how many attempts there were beyond one a unit."""
        return self.attempts().total() - len(self.attempts())

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
        if name in _ERRORS:
            raise _ERRORS[name]()
        return globals()[f"_do_{name}"](self, unit, argument)


class ToyPublication(Publication):
    """The output of a toy stage."""

    def folders(self) -> tuple[str, ...]:
        return ("first", "last")

    def discard(self) -> None:
        for name in self.folders():
            for path in (self.root / name).glob("*"):
                path.unlink()
        (self.root / "merged.txt").unlink(missing_ok=True)


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


def _do_end_supervisor(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    """Kills or stops the process that starts the ranks, and this one."""
    # The server that ranks are forked from is between them.
    status = Path(f"/proc/{os.getppid()}/stat").read_text()
    for pid in (int(status.rpartition(")")[2].split()[1]), os.getpid()):
        os.kill(pid, getattr(signal, argument))


def _do_fail_on_rank_1(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    """On rank 1 each unit fails from its third on."""
    if rank_number() == 1:
        stage.mark("on-1")
        if len(stage.marked("on-1")) > 2:
            raise ValueError("the codec is broken here")


def _do_refuse_rank_1(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    """Rank 1 can never be set up; the others wait until it was tried."""
    if rank_number() == 1:
        raise RuntimeError("unable to find an engine to execute this computation")
    wait_until(lambda: len(stage.pids()) > 1)


def _do_segfault(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    ctypes.string_at(0)


def _do_sysexit(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    sys.exit(int(argument))


def _cuda_memory() -> Exception:
    import torch

    return torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 19.00 GiB.")


def _break_context() -> Exception:
    """As a data-dependent error in a kernel does."""
    import torch

    broken.append(torch.AcceleratorError(ASSERT))
    return broken[0]


# Behaviours that raise an error: functions that create it.
_ERRORS: dict[str, Callable[[], Exception]] = {
    "memory": partial(MemoryError, "93 TiB are not to be had"),
    "device": partial(RuntimeError, "CUDA error: all CUDA-capable devices are busy or unavailable"),
    "cuda_memory": _cuda_memory,
    "no_engine": partial(RuntimeError, "GET was unable to find an engine to execute this computation"),
    "break": _break_context,
    "full": partial(OSError, errno.ENOSPC, "No space left on device"),
    "cufft": partial(RuntimeError, "cuFFT error: CUFFT_INTERNAL_ERROR"),
    "config": partial(ConfigError, "model 'x' is unknown; use 'y'", code="unknown_name"),
    "absent": partial(ModuleNotFoundError, "No module named 'nemo'", name="nemo"),
    "fatal": partial(FatalError, "the disk is full", code="disk"),
}


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


def _do_environment(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    stage.mark("environment", f"{os.getpid()} {os.environ.get(argument)}")


def _do_assert(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    """Make a real GPU fail with a device-side assert."""
    import torch

    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()


def _do_meet(stage: ToyStage, unit: Unit | None, argument: str) -> None:
    """Waits until ``argument`` ranks are there."""
    wait_until(lambda: len(stage.pids()) >= int(argument))


class GpuStage(ToyStage):
    resource = "gpu"


class GoesBlind(ToyStage):
    """The rank of unit 2 does not see the audio any more while it does that."""

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        if unit.index == 2 and not self.marked("blind"):
            self.mark("blind", str(os.getpid()))
            output = _do_reject(self, unit, "missing_audio")
            self.mark("attempts", f"2 {os.getpid()}")
            return output
        return super().work(unit, staging, advance)

    def input(self, run: StageRun) -> "GoesBlind":
        return self

    def check(self) -> None:
        """Nothing is wrong before the work."""

    def check_node(self) -> None:
        if str(os.getpid()) in self.marked("blind"):
            raise DeviceError("this node does not see the audio", place="node a", code="unlike_nodes")


@dataclass
class RecordingListener(Listener):
    """A listener that remembers."""

    done: list[int] = field(default_factory=list)
    failed: dict[int, FailedAttempt] = field(default_factory=dict)

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        self.done.append(unit.index)

    def stage_ended(self, stage: StageRun, result: StageResult) -> None:
        self.failed |= result.failures


def run(
    stage: ToyStage, workers: int = 1, *, restart: bool = False, executor: Executor | None = None
) -> tuple[StageResult, RecordingListener]:
    """Runs the stage as the pipeline would, by default with ranks of this machine."""
    heard, in_run = RecordingListener(), stage.in_run
    executor = executor or LocalExecutor(workers)
    with locked(in_run.run_dir, wait_seconds=60.0) as lock, reserved(in_run.run_dir, [in_run], restart=restart):
        result = run_stage(in_run, executor, heard, restart=restart, unlocked=lock.released)
    return result, heard


def output_bytes(stage: ToyStage) -> dict[str, bytes]:
    """All that lies in the output folder, by name, but for the reservation of the run."""
    return {
        path.relative_to(stage.root).as_posix(): path.read_bytes()
        for path in sorted(stage.root.rglob("*"))
        if path.is_file() and path.suffix != ".reservation"
    }


def rank_number() -> int:
    """The number of the rank that this process is."""
    return int(multiprocessing.current_process().name.rpartition("-")[2])


def wait_until(condition: Any, seconds: float = 120.0) -> None:
    """Returns when ``condition()`` holds; fails the test if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def session_members(session: int) -> dict[int, int]:
    """Return the processes of a session that have not ended, with their parents."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, parent, _, own = path.read_text().rpartition(")")[2].split()[:4]
            if state not in ("Z", "X") and int(own) == session:
                found[int(path.parent.name)] = int(parent)
    return found


def is_running(pid: int) -> bool:
    """Return True if there is such a process that has not ended; a zombie has."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


ECC = "CUDA error: uncorrectable ECC error encountered"


class LookingAhead(GpuStage):
    """Record for each unit the next unit announced to its rank, and the rank's number of cores."""

    def open(self, run: StageRun, device: str) -> Processor:
        processor = super().open(run, device)
        self.mark("cores", str(usable_cores()))
        processor.expect = lambda unit: self.mark("expected", "none" if unit is None else str(unit.index))
        return processor


class KindStage(GpuStage):
    """The ranks report the device kind that ``kinds`` has for the value of CUDA_VISIBLE_DEVICES."""

    def __init__(self, folder: Path, *, kinds: dict[str, str], **options: Any):
        super().__init__(folder, **options)
        self.kinds = kinds

    def open(self, run: StageRun, device: str) -> Processor:
        processor = super().open(run, device)
        processor.device_kind = self.kinds[os.environ["CUDA_VISIBLE_DEVICES"]]
        return processor


class BadDevices(GpuStage):
    """Setup fails if CUDA_VISIBLE_DEVICES names one of ``bad``; other ranks wait until these were tried."""

    def __init__(self, folder: Path, *, bad: tuple[str, ...], tries: int = 3, **options: Any):
        super().__init__(folder, **options)
        self.bad, self.tries = bad, tries

    def load(self, device: str) -> None:
        super().load(device)
        if os.environ["CUDA_VISIBLE_DEVICES"] in self.bad:
            self.mark("bad", os.environ["CUDA_VISIBLE_DEVICES"])
            raise RuntimeError(ECC)

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        wait_until(lambda: len(self.marked("bad")) >= self.tries * len(self.bad))
        return super().work(unit, staging, advance)
