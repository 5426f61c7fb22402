"""Executors that a configuration can name: their common keys and interface, and the executor for this machine."""

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
    """The result of one check of this machine: the finding, and what to do if there is a problem."""

    name: str
    found: str
    to_do: str = ""


@dataclass(frozen=True)
class ConfiguredExecutor(Executor):
    """Place where the stages run. SLURM has no key here, because `sharmill submit` takes a cluster profile.

    A subclass is a frozen dataclass with its own further keys, whose ``kind`` is its name in the registry. It starts
    supervisors, whose ranks process the units.

    Attributes:
        runs_here: True if all its ranks are on this machine.
        keeps_attempts: True if attempts of earlier ranks still count.
    """

    runs_here: ClassVar[bool] = False
    keeps_attempts: ClassVar[bool] = False

    kind: str = field(default="local", kw_only=True)
    """``local``: processes on this machine. ``ray``: actors on a Ray cluster. ``python:package.module:Class``: an
    executor from another package."""
    workers: Positive | Literal["auto"] = "auto"
    """Number of ranks. ``auto``: one per visible GPU for match and encode if there are any, otherwise one per core.
    ``1`` on the CPU runs inside the main process, for debuggers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for match and encode. ``auto``: a GPU for each rank if there are any; a job that was allocated GPUs but
    finds none ends with an error. ``cuda``: only GPUs; on Ray, wait for GPU nodes. ``cpu``: no GPU is used."""
    feeders: Annotated[int, msgspec.Meta(ge=0)] | Literal["auto"] = "auto"
    """Number of processes per rank of match and encode that decode audio ahead of the model. ``auto``: with a GPU, one
    fewer than the rank's cores, at most 16; on the CPU none. ``0``: the rank itself decodes."""
    unit_time_limit: Above0 | Literal["auto"] | None = "auto"
    """Time limit for an attempt at a unit, in seconds, also on SLURM. A slower rank is replaced, with a traceback in
    its log, and the attempt counts as failed. ``auto``: ten seconds per second of audio or per record, at least an
    hour. ``null``: no limit. ``workers: 1`` runs inside the main process only with ``auto`` or ``null``, and without a
    limit."""
    scratch: str | None = None
    """Folder on a local disk of each node, such as ``$TMPDIR``. Ranks write the files of a unit there before they copy
    them to the dataset's disk. ``null``: they write directly to that disk."""
    seconds_until_seen: NotNegative = 60.0
    """Longest delay, in seconds, until every node sees a new file, on SLURM and Ray. Ranks wait this long for files of
    other ranks. NFS caches names for up to 60 s by default (``acdirmax``). Lustre, GPFS and CephFS need 0."""
    least_seconds_per_rank: NotNegative | None = None
    """Minimum predicted work per rank on SLURM, in seconds. It limits the number of ranks if a pilot (``sharmill
    calibrate``) or completed units show the stage's pace. ``null``: four times the pilot's time to start a rank and
    load its model. ``0``: as many ranks as the profile allows."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level of messages in the logs of ranks. ``DEBUG`` adds rejects."""

    @classmethod
    def examine(cls) -> Iterator[Check]:
        """Yield the checks of `sharmill doctor` for executors of this class on this machine."""
        yield from ()

    def check(self, config: Config) -> None:
        """Raise ConfigError if runs of a configuration cannot work with this executor."""

    def run(
        self, stage: StageRun, units: Sequence[Unit], listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> StageResult:  # fmt: skip
        """Process the units, and return the result; see ``engine.executor.Executor``."""
        # Ranks on other nodes may join later than the first ones.
        join_seconds = 0.0 if self.runs_here else stage.options.lease_seconds
        most = max(1, min(self.num_ranks(stage, units), len(units)))
        with driven_launch(
            stage, units, most, join_seconds=join_seconds, keeps_attempts=self.keeps_attempts
        ) as numbers:
            watcher = Watcher(stage, units, listener)
            try:
                with unlocked():
                    self.supervise(stage, numbers, watcher)
            finally:
                watcher.close()
        return watcher.outcome()

    @abstractmethod
    def num_ranks(self, stage: StageRun, units: Sequence[Unit]) -> int:
        """Return the number of ranks to start; it is limited to the number of units."""

    @abstractmethod
    def supervise(self, stage: StageRun, numbers: Sequence[int], watcher: Watcher) -> None:
        """Start ranks with these numbers, and return when they have ended; meanwhile, call the watcher's ``look``.

        To run ranks on this machine, use a ``Supervisor``. To run one rank in a process elsewhere, call
        ``supervise_rank`` there.
        """


@dataclass(frozen=True)
class LocalExecutor(ConfiguredExecutor):
    """Runs a stage on this machine, with ``workers`` ranks on the devices chosen by ``device``."""

    runs_here: ClassVar[bool] = True

    def require_devices(self, stages: Iterable[StageRun]) -> None:
        if any(stage.resource == "gpu" for stage in stages):
            usable_gpus(self.device)

    def num_ranks(self, stage: StageRun, units: Sequence[Unit]) -> int:
        return len(self._devices(stage))

    def supervise(self, stage: StageRun, numbers: Sequence[int], watcher: Watcher) -> None:
        devices = self._devices(stage)[: len(numbers)]
        # A rank with a GPU or a time limit needs its own process, because a failed device may break that process, and
        # the time limit may end it.
        has_limit = isinstance(stage.options.unit_time_limit, float | int)
        is_inline = str(self.workers) == "1" and devices[0].kind == "cpu" and not has_limit
        with logging_to(stage.dir.rank_log(numbers[0]) if is_inline else stage.dir.driver_log, stage.options.log_level):
            watcher.look()
            if is_inline:
                rank = Rank(numbers[0], devices[0].slot(numbers[0]), "cpu", is_replaced=False, most_pause=1.0)
                # Hide the GPUs only during this stage, because the next stage in this process may need them.
                with variable(VISIBLE, ""):
                    work(stage, rank, watcher)
            else:
                Supervisor(watcher, dict(zip(numbers, devices, strict=True)), beat_seconds=1.0).run()

    def _devices(self, stage: StageRun) -> list[Device]:
        uses_gpu = stage.resource == "gpu"
        gpus = usable_gpus(self.device) if uses_gpu else ()
        return plan_devices(self.workers, uses_gpu=uses_gpu, gpus=gpus, cores=usable_cores())


class JoiningExecutor(LocalExecutor):
    """Adds ranks of this machine to a run that was started elsewhere."""

    keeps_attempts: ClassVar[bool] = True


@contextmanager
def run_alone(
    declaration: Stage, run_dir: RunDir, *, workers: int | Literal["auto"] = "auto", listener: Listener | None = None,
    restart: bool = False, resumes: bool = True,
) -> Iterator[tuple[StageRun, StageResult]]:  # fmt: skip
    """Run a stage that belongs to no dataset, and yield it with its result; its run directory is removed at the end.

    Args:
        run_dir: a run directory for this stage only.
        restart: discard the state of an interrupted run instead of resuming it.
        resumes: True if an interrupted run leaves its state for the next one to resume; otherwise it leaves nothing.

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
                # Rename the folder away in one step, because a later run must not resume from a partly removed state.
                remove_at_once(stage.dir.path)
            finally:
                if not resumes and stage.dir.token_file.exists():
                    remove_at_once(stage.dir.path)
                if not stage.dir.token_file.exists():
                    # The stage is finished or was never planned. An earlier run may have been killed while cleaning up.
                    remove_temp_files(run_dir.path, {stage.dir.path.name})
                    for path in (run_dir.id, run_dir.reserved):
                        path.unlink(missing_ok=True)
                    remove_if_empty(stage.dir.path)
    finally:
        remove_if_empty(run_dir.path)
