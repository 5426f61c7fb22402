"""The dataset of simulated clusters: two stages, whose units write what is known without running them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from sharmill.directing import claimed, directed
from sharmill.engine.fence import require_own_output, stop_ranks
from sharmill.engine.ledger import committed_files
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.plan import mark_to_begin_anew
from sharmill.engine.run import Executor, run_stage
from sharmill.engine.rundir import RunDir, StageDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import ConfigError
from sharmill.ports import clock, process
from sharmill.staging import Staging
from sharmill.storage import checksum_bytes, remove_asides, remove_for_good, write_atomic

NAMES = ("first", "second")
RECORDS_PER_UNIT = 3
FIELDS = ("audio", "cuts")


class Attempt(NamedTuple):
    """An attempt at a unit; ``role`` and ``job`` are of the job that made it, ``task`` is its rank in an array.

    ``pid`` is the process that runs in the job or has the rank as its child, and ``rank_pid`` that of the rank.
    """

    stage: str
    token: str
    unit: int
    role: str
    job: str
    task: str
    pid: int
    rank_pid: int
    began: float


# Of the schedule at work: attempts at units, and the processes that direct the run.
attempts: list[Attempt] = []
directors: list[tuple[str, int]] = []
second_writers: list[tuple[int, int]] = []
# What is to happen when an attempt begins.
on_attempt: list[Callable[[Attempt], None]] = []


def content(stage: str, option: int, unit: int, field: str) -> bytes:
    """Return the bytes of a file of a unit."""
    return f"{field} of unit {unit} of {stage} with option {option}\n".encode()


class SimStage(Stage):
    """A stage of few units; ``behaviour`` says what the first does to its rank: ``kill``, ``hang`` or nothing."""

    kind: ClassVar[str] = "sim"

    def __init__(
        self, folder: Path, name: str, units: int, option: int, seconds: float, behaviour: str, run: str, *, own: bool
    ) -> None:
        self.run_dir = RunDir(folder / run)
        # Its own folder, as that of stages whose output is no part of a dataset.
        self.root = self.run_dir.stage(name).path if own else folder / "out"
        self.folders = tuple(f"{name}_{field}" for field in FIELDS)
        self._name = name
        self.units = units
        self.option = option
        self.seconds = seconds
        self.behaviour = behaviour

    @property
    def name(self) -> str:
        return self._name

    def identity(self) -> dict[str, Any]:
        return {"option": self.option, "units": self.units}

    def plan(self, folder: Path) -> Iterator[Unit]:
        for index in range(self.units):
            yield make_unit(index, cost=float(index % 3 + 1), size=RECORDS_PER_UNIT, params={"index": index})

    def open(self, device: str) -> Processor:
        clock.sleep(self.seconds / 4)
        return _SimProcessor(self)

    def products(self) -> list[Path]:
        return [self.root / f"{self.name}.txt"]

    def check_output(self) -> None:
        # As the stage write does, where there is no index: all by name, and one by its checksum.
        paths = {
            path.relative_to(self.root).as_posix(): path
            for name in self.folders
            for path in (self.root / name).glob("*")
        }
        own = {file.name: file.xxh3 for file in committed_files(self)}
        in_place = (checksum_bytes(paths[name].read_bytes()) == own[name] for name in paths.keys() & own.keys())
        if paths and (paths.keys() - own.keys() or not any(in_place)):
            raise ConfigError(f"{min(paths)} is another run's", code="foreign_output")

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        # As finalize of every stage does whose products are in the dataset directory, where others publish too.
        remove_asides(self.root, {self.products()[0].name})
        write_atomic(
            self.products()[0], b"".join((self.root / commit.files[-1].name).read_bytes() for commit in commits)
        )
        return add_up(commits)

    def discard(self) -> None:
        if not self.shares_root:
            return
        names = NAMES[NAMES.index(self.name) :]
        files = [path for name in names for field in FIELDS for path in (self.root / f"{name}_{field}").glob("*")]
        remove_for_good([*files, *(self.root / f"{name}.txt" for name in names)])

    def later(self) -> list[StageDir]:
        names = NAMES[NAMES.index(self.name) + 1 :] if self.shares_root else ()
        return [self.run_dir.stage(name) for name in names]


class _SimProcessor(Processor):
    def __init__(self, stage: SimStage) -> None:
        self.stage = stage

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        stage = self.stage
        role, job, array, task = (
            process.environ.get(f"SLURM_{name}", "") for name in ("JOB_NAME", "JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID")
        )
        pid = int(process.environ.get("SIM_PARENT", process.getpid()))
        attempt = Attempt(
            stage.name, stage.token, unit.index, role, array or job, task, pid, process.getpid(), clock.monotonic()
        )
        attempts.append(attempt)
        for do in list(on_attempt):
            do(attempt)
        names = [f"{folder}/{unit.index:06d}.txt" for folder in stage.folders]
        for field, name in zip(FIELDS, names, strict=True):
            # A node may be slow.
            clock.sleep(stage.seconds * unit.cost * (8.0 if process.gethostname() == "n3" else 1.0) / len(FIELDS))
            staging.path(name).write_bytes(content(stage.name, stage.option, unit.index, field))
        if unit.index == 0 and stage.behaviour == "kill":
            process.end_at_once(11)
        if unit.index == 0 and stage.behaviour == "hang":
            clock.sleep(1e7)
        return Output(files=names, num_out=unit.size, stats={"seconds": 60.0})


@dataclass(frozen=True)
class SimDataset:
    """The dataset, as chains take it, and as ``sharmill run`` would.

    ``shared`` are the names of the stages that publish into the dataset directory.
    """

    folder: Path
    units: int = 4
    option: int = 1
    seconds: float = 20.0
    behaviour: str = ""
    unit_time_limit: float | Literal["auto"] = "auto"
    take_over: bool = False
    run_name: str = "run"
    shared: tuple[str, ...] = NAMES
    name: str = "toy"
    num_errors: int = 0
    appended: str = ""
    stages: tuple[tuple[Stage, StageResult], ...] = ()

    @property
    def run_dir(self) -> Path:
        return self.folder / self.run_name

    def make_stages(self) -> list[Stage]:
        stages: list[Stage] = [
            SimStage(
                self.folder, name, self.units, self.option, self.seconds, self.behaviour, self.run_name,
                own=name not in self.shared,
            )
            for name in NAMES
        ]  # fmt: skip
        for stage in stages:
            stage.unit_time_limit = self.unit_time_limit
        return stages

    def run(self, executor: Executor, listener: Listener, *, restart: bool, wait_seconds: float) -> SimDataset:
        """Do what ``pipeline.run_dataset`` does."""
        results: list[tuple[Stage, StageResult]] = []
        run_dir = RunDir(self.run_dir)
        require_own_output(next(stage for stage in self.make_stages() if stage.shares_root))
        with (
            directed(run_dir, executor, wait_seconds=wait_seconds, take_over=self.take_over), _directing(self.run_dir)
        ):  # fmt: skip
            # By it sharmill cancel knows a run directory.
            write_atomic(run_dir.config, b"{}")
            with claimed(run_dir, self.make_stages(), executor, restart=restart):
                for stage in self.make_stages() if restart else ():
                    stop_ranks(stage)
                    mark_to_begin_anew(stage)
                for stage in self.make_stages():
                    result = run_stage(stage, executor, listener, max_reject_fraction=0.5, restart=restart)
                    results.append((stage, result))
                    if not result.ok:
                        break
        return replace(self, stages=tuple(results))

    def show(self) -> None:
        """Show nothing."""


@contextmanager
def _directing(run_dir: Path) -> Iterator[None]:
    """Note that this process directs the run, and with it any other that does so at the same time."""
    this = (str(run_dir), process.getpid())
    second_writers.extend((this[1], pid) for run, pid in directors if run == this[0] and not process.is_gone(pid))
    directors.append(this)
    try:
        yield
    finally:
        directors.remove(this)


def expected_files(dataset: SimDataset) -> dict[str, bytes]:
    """Return the files that an undisturbed run leaves in the dataset directory, by name."""
    files: dict[str, bytes] = {}
    for name in dataset.shared:
        for field in FIELDS:
            for unit in range(dataset.units):
                files[f"{name}_{field}/{unit:06d}.txt"] = content(name, dataset.option, unit, field)
        last: Sequence[bytes] = [content(name, dataset.option, unit, FIELDS[-1]) for unit in range(dataset.units)]
        files[f"{name}.txt"] = b"".join(last)
    return files
