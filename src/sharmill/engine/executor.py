"""The interfaces of executors and of listeners to a run, and the result of a stage."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sharmill.engine.progress import RankProgress
from sharmill.engine.run_dir import RunDir, RunRequest
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Commit, FailedAttempt, Totals, Unit

Unlocked = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Submitted:
    """Submitted jobs: the ranks, and a driver job that continues the run when the ranks have ended.

    Attributes:
        message: one sentence about the submission.
        jobs: the ids of all submitted jobs.
    """

    message: str
    jobs: list[str]


@dataclass(frozen=True)
class StageResult:
    """Result of a stage, or of an executor's work on it.

    Attributes:
        totals: the accounts of a finished stage; None if it is not finished.
        failures: the last error of each unit that failed for good, by unit index.
        submitted: the jobs that were submitted to do the work; None if there are none.
        given_up: one sentence for each rank or device that could not be used.
    """

    totals: Totals | None = None
    failures: dict[int, FailedAttempt] = field(default_factory=dict)
    submitted: Submitted | None = None
    given_up: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return True if the stage is finished."""
        return self.totals is not None


class Listener:
    """Base class for listeners to the events of a run. A subclass overrides the events that it needs.

    All methods are called in the thread that runs the stage.
    """

    def stage_started(self, stage: StageRun, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        """Called when a stage starts; ``done`` has the commits of earlier runs."""

    def looked(self, ranks: Sequence[RankProgress]) -> None:
        """Called about once a second with the progress of all ranks, including finished ones."""

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        """Called when a unit is complete."""

    def stage_ended(self, stage: StageRun, result: StageResult) -> None:
        """Called when a stage is finished, has ended with failed units, or has been submitted."""


class Executor(ABC):
    """Base class for executors, which start the ranks of a stage.

    Attributes:
        waits: True if ``run`` returns when the ranks have ended. False if it submits the ranks to a queue; the queue is
            then asked which of them are alive.
    """

    waits: ClassVar[bool] = True

    def require_devices(self, stages: Iterable[StageRun]) -> None:  # noqa: B027 - most executors check on the nodes
        """Raise ConfigError if the stages need GPUs on this machine and none can be used."""

    def find_jobs(self, run_dir: RunDir) -> Sequence[Any] | None:
        """Return the queued jobs of a run; ``str(job)`` describes a job.

        Return None if this process continues a run that another process has started.

        Raises:
            ConfigError: queued jobs of the run exist, or may exist, so this executor must not start.
            FatalError: the run that this process should continue has ended.
        """
        return ()

    def begin(self, run_dir: RunDir, request: RunRequest, jobs: Sequence[Any], *, is_joining: bool) -> None:
        """Record the start of a run, unless this process joins it; ``jobs`` is the result of ``find_jobs``."""
        if not is_joining:
            run_dir.begin(request)

    @abstractmethod
    def run(
        self,
        stage: StageRun,
        units: Sequence[Unit],
        listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> StageResult:
        """Process the units, or submit ranks that will process them, and return the result of that work.

        An executor that waits for ranks does so in an ``unlocked`` context, so that other processes may join, and
        reports their progress to the listener. An executor that submits ranks reports nothing.

        Raises:
            ConfigError: the stage cannot be run with this configuration.
            FatalError: the stage cannot continue, or it has rejected more records than allowed.
        """
