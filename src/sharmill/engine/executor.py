"""Contracts of what runs the ranks of a stage and of what follows a run, and the outcome of a stage."""

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
    """An executor has submitted ranks and, behind them, a job that continues when they have ended.

    Attributes:
        message: one sentence that says so.
        jobs: the numbers of all these jobs.
    """

    message: str
    jobs: list[str]


@dataclass(frozen=True)
class StageResult:
    """Outcome of a stage, or of the work of an executor on it.

    Attributes:
        totals: the accounts of a stage that is done.
        failures: the units that failed for good, by index.
        submitted: what was submitted and is not done yet.
        given_up: names ranks and devices that could not be used on the way, a sentence each.
    """

    totals: Totals | None = None
    failures: dict[int, FailedAttempt] = field(default_factory=dict)
    submitted: Submitted | None = None
    given_up: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return True if the stage is done."""
        return self.totals is not None


class Listener:
    """Base of those that follow a run: a subclass overrides the events that it shows; the others do nothing.

    All methods are called in the thread that runs the stage.
    """

    def stage_started(self, stage: StageRun, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        """Take note that a stage begins; ``done`` are the commits of earlier runs."""

    def looked(self, ranks: Sequence[RankProgress]) -> None:
        """Take note of the heartbeats of all ranks, those that have ended too; called about once a second."""

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        """Take note that a unit is done."""

    def stage_ended(self, stage: StageRun, result: StageResult) -> None:
        """Take note that a stage is done, or has units that failed, or is submitted."""


class Executor(ABC):
    """Base of what runs the worker loop on ranks.

    One that ``waits`` returns when its ranks have ended; another submits them to a queue, which knows which are alive.
    """

    waits: ClassVar[bool] = True

    def require_devices(self, stages: Iterable[StageRun]) -> None:  # noqa: B027 - most find out where the ranks are
        """Raise ConfigError where stages are to run on GPUs of this machine, and none can be used."""

    def find_jobs(self, run_dir: RunDir) -> Sequence[Any] | None:
        """Return the jobs of a run that are in a queue, each of which has a text.

        None in a process that goes on with a run which another one has begun: it begins nothing.

        Raises:
            ConfigError: jobs are, or may be, in a queue beside which this executor must not begin.
            FatalError: the run that this process was to go on with has ended.
        """
        return ()

    def begin(self, run_dir: RunDir, given: RunRequest, jobs: Sequence[Any], *, joins: bool) -> None:
        """Note the beginning of a run, unless this process joins it; ``jobs`` are those of ``find_jobs``."""
        if not joins:
            run_dir.begin(given)

    @abstractmethod
    def run(
        self,
        stage: StageRun,
        units: Sequence[Unit],
        listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> StageResult:
        """Do the units, and return those that failed for good; or submit ranks that will do them.

        The listener follows what the executor sees: where ranks are submitted, nothing. An executor that waits for
        ranks does so in an ``unlocked`` context, so that others may join.

        Raises:
            ConfigError: the stage cannot be run like this.
            FatalError: the stage cannot go on, or more is rejected than the stage allows.
        """
