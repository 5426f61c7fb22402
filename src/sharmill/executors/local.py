"""Executors that a configuration can name: the keys of all, what they are asked, and the executor of this machine."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import msgspec

from sharmill.config import Above0, Config, NotNegative, Positive
from sharmill.engine.executor import Executor, Listener, StageResult, Unlocked
from sharmill.engine.launch import driven_launch
from sharmill.engine.parent import Rank
from sharmill.engine.run import locked, reserved, run_stage
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import Stage, StageRun
from sharmill.engine.unit import Unit
from sharmill.engine.watch import Watcher
from sharmill.engine.work import work
from sharmill.errors import FatalError
from sharmill.executors.supervisor import VISIBLE, Device, Supervisor, logging_to, plan_devices, usable_gpus
from sharmill.files.atomic import remove_at_once, remove_if_empty, remove_temp_files
from sharmill.files.disk import disk_errors
from sharmill.files.host import usable_cores, variable
from sharmill.files.trust import require_trusted_owner


class Check(msgspec.Struct, frozen=True):
    """A thing of this machine that was looked at: what was found, and what to do where that is off."""

    name: str
    found: str
    to_do: str = ""


@dataclass(frozen=True)
class ConfiguredExecutor(Executor):
    """Place where the stages run. SLURM has no key here: `sharmill submit` takes a cluster profile.

    A subclass is a frozen dataclass with its further keys, whose ``kind`` is its name in the registry. It starts
    supervisors, whose ranks do the units.

    Attributes:
        runs_here: its ranks are on this machine alone.
        goes_on: attempts of ranks that have ended before count on.
    """

    runs_here: ClassVar[bool] = False
    goes_on: ClassVar[bool] = False

    kind: str = field(default="local", kw_only=True)
    """``local``: processes on this machine. ``ray``: actors on a Ray cluster. Or an executor of another package:
    ``python:package.module:Class``."""
    workers: Positive | Literal["auto"] = "auto"
    """Number of ranks. ``auto``: one per visible GPU for match and encode where there are any, else one per core. ``1``
    on the CPU runs inside the process, so that a debugger works."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of match and encode. ``auto``: a GPU for each rank where there are any; a job that was given GPUs and
    finds none is refused. ``cuda``: GPUs or nothing; on Ray, wait for GPU nodes. ``cpu``: no GPU is touched."""
    feeders: Annotated[int, msgspec.Meta(ge=0)] | Literal["auto"] = "auto"
    """Processes of each rank of match and encode that read and decode audio ahead of its model. ``auto``: one for each
    of its cores but one where the rank has a GPU, 16 at most; none on the CPU, where the model takes the core. ``0``:
    the rank decodes."""
    unit_time_limit: Above0 | Literal["auto"] | None = "auto"
    """Seconds that an attempt at a unit may take, on SLURM too; a slower rank is ended with a traceback in its log and
    replaced, and the attempt has failed. ``auto``: ten for each second of audio or record of the unit, and an hour at
    least; none where ``workers: 1`` runs inside the process, which a number prevents. ``null``: no limit."""
    scratch: str | None = None
    """Folder on a disk of each node, such as ``$TMPDIR`` of the node: there ranks write the files of a unit, before
    they copy them beside the dataset. ``null``: they write beside it at once."""
    seconds_until_seen: NotNegative = 60.0
    """Seconds until every node sees what another has written, on SLURM and Ray: so long files of others are waited for.
    NFS keeps names for 60 at most by default (``acdirmax``). Coherent file systems (Lustre, GPFS, CephFS) need none:
    0."""
    least_seconds_per_rank: NotNegative | None = None
    """Least predicted seconds of work of a rank on SLURM: no more ranks are submitted, where the pace of the stage
    is known by a pilot (`sharmill calibrate`) or units done. ``null``: four times what starting a rank and loading
    its model took in the pilot. ``0``: as many ranks as the profile allows."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level of lines in logs of ranks. ``DEBUG`` adds rejects."""

    @classmethod
    def examine(cls) -> Iterator[Check]:
        """Yield what `sharmill doctor` is to tell about executors of this class on this machine."""
        yield from ()

    def check(self, config: Config) -> None:
        """Raise ConfigError where the runs of a configuration cannot work here."""

    def run(
        self, stage: StageRun, units: Sequence[Unit], listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> StageResult:  # fmt: skip
        """Do the units, and return those that failed for good; see ``engine.executor.Executor``."""
        # Ranks of other nodes may come later than those that are there.
        join_seconds = 0.0 if self.runs_here else stage.options.lease_seconds
        most = max(1, min(self.num_ranks(stage, units), len(units)))
        with driven_launch(stage, units, most, join_seconds=join_seconds, goes_on=self.goes_on) as numbers:
            watcher = Watcher(stage, units, listener)
            try:
                with unlocked():
                    self.supervise(stage, numbers, watcher)
            finally:
                watcher.close()
        return watcher.outcome()

    @abstractmethod
    def num_ranks(self, stage: StageRun, units: Sequence[Unit]) -> int:
        """Return the number of ranks that are wanted; there are never more than units."""

    @abstractmethod
    def supervise(self, stage: StageRun, numbers: Sequence[int], watcher: Watcher) -> None:
        """Start ranks with these numbers, and return when they have ended; have the watcher ``look`` meanwhile.

        A ``Supervisor`` runs ranks in this process's environment; ``supervise_rank`` does so in a process elsewhere.
        """


@dataclass(frozen=True)
class LocalExecutor(ConfiguredExecutor):
    """Runs a stage on ``workers`` ranks of this machine (a number, or ``auto``), on GPUs as ``device`` says."""

    runs_here: ClassVar[bool] = True

    def require_devices(self, stages: Iterable[StageRun]) -> None:
        if any(stage.resource == "gpu" for stage in stages):
            usable_gpus(self.device)

    def num_ranks(self, stage: StageRun, units: Sequence[Unit]) -> int:
        return len(self._devices(stage))

    def supervise(self, stage: StageRun, numbers: Sequence[int], watcher: Watcher) -> None:
        devices = self._devices(stage)[: len(numbers)]
        # A device may break its process, and a time limit kills it.
        has_limit = isinstance(stage.options.unit_time_limit, float | int)
        is_inline = str(self.workers) == "1" and devices[0].kind == "cpu" and not has_limit
        with logging_to(stage.dir.rank_log(numbers[0]) if is_inline else stage.dir.driver_log, stage.options.log_level):
            watcher.look()
            if is_inline:
                rank = Rank(numbers[0], devices[0].slot(numbers[0]), "cpu", is_replaced=False, most_pause=1.0)
                # The next stage of this process may use the GPUs that this one must not see.
                with variable(VISIBLE, ""):
                    work(stage, rank, watcher)
            else:
                Supervisor(watcher, dict(zip(numbers, devices, strict=True)), beat_seconds=1.0).run()

    def _devices(self, stage: StageRun) -> list[Device]:
        uses_gpu = stage.resource == "gpu"
        gpus = usable_gpus(self.device) if uses_gpu else ()
        return plan_devices(self.workers, uses_gpu=uses_gpu, gpus=gpus, cores=usable_cores())


class JoiningExecutor(LocalExecutor):
    """Adds ranks of this machine to a run that was begun elsewhere."""

    goes_on: ClassVar[bool] = True


@contextmanager
def run_alone(
    declaration: Stage, run_dir: RunDir, *, workers: int | Literal["auto"] = "auto", listener: Listener | None = None,
    restart: bool = False, resumes: bool = True,
) -> Iterator[tuple[StageRun, StageResult]]:  # fmt: skip
    """Run a stage that belongs to no dataset's run, and provide it with its result; its run directory goes at the end.

    Args:
        run_dir: a run directory of its own.
        restart: discard what an interrupted run has left, instead of going on.
        resumes: an interrupted run leaves its state for the next to go on from; else it leaves nothing.

    Raises:
        ConfigError: the run directory is locked by another process, or the stage cannot be planned.
        FatalError: units failed.
    """
    stage = StageRun(declaration, run_dir)
    require_trusted_owner(run_dir.path.parent, [run_dir.path])
    try:
        with disk_errors(run_dir.path), locked(run_dir):
            try:
                with reserved(run_dir, [stage], restart=restart or not resumes):
                    result = run_stage(
                        stage, LocalExecutor(workers), listener or Listener(), restart=restart or not resumes
                    )
                    if not result.ok:
                        reasons = "; ".join(dict.fromkeys(error.message for error in result.failures.values()))
                        raise FatalError(f"{stage.root} is not finished: {reasons}", code="units_failed")
                    yield stage, result
                # At once, so that no later run takes what a killed process has left of it for a state to go on from.
                remove_at_once(stage.dir.path)
            finally:
                if not resumes and stage.dir.token_file.exists():
                    remove_at_once(stage.dir.path)
                if not stage.dir.token_file.exists():
                    # It is finished, or nothing was begun; a run that ended may have been killed while it removed this.
                    remove_temp_files(run_dir.path, {stage.dir.path.name})
                    for path in (run_dir.id, run_dir.reserved):
                        path.unlink(missing_ok=True)
                    remove_if_empty(stage.dir.path)
    finally:
        remove_if_empty(run_dir.path)
