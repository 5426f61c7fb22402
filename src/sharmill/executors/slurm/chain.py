"""A dataset on SLURM, from stage to stage without a process that has to wait: every step submits the next.

A step runs the stages as they stand: what is complete is finalized, what is missing is submitted with the next step
behind it. Each dataset has its own chain, so that a slow one does not hold up another.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from sharmill.config import Config
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import FailedAttempt, StageResult
from sharmill.engine.run import locked
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.executors.logs import logging_to
from sharmill.executors.slurm.executor import SlurmExecutor, Submitted, describe_jobs, is_step
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.executors.slurm.queue import QueuedJob, SlurmSilent, queued_jobs
from sharmill.pipeline import DatasetResult, make_stages, run_dataset
from sharmill.storage import remove_tree, require_writable, write_atomic
from sharmill.validate.report import Report

log = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
_SECONDS_BETWEEN_QUESTIONS = 10.0
# A step may begin before the one that submitted it has left the run directory.
_SECONDS_TO_WAIT_FOR_LOCK = 600.0


class ChainState(msgspec.Struct, kw_only=True):
    """How far a chain has got. ``jobs`` are those that the last step submitted."""

    state: Literal["waiting", "done", "failed"]
    message: str
    jobs: list[str] = []
    findings: int = 0


@dataclass(frozen=True)
class Chain:
    """The chain of one dataset; as a callable, its next step."""

    config: Config
    stages: tuple[str, ...]
    profile: ClusterProfile
    restart: bool = False
    redo: Report | None = None

    @property
    def run_dir(self) -> RunDir:
        return RunDir(Path(self.config.run_dir).absolute())

    def start(self) -> ChainState:
        """The first step, in this process: plans and submits. Units that were given up before have new attempts.

        Raises:
            ConfigError: the configuration is wrong, or this dataset has a chain in the queue.
            FatalError: a stage stopped, or the step failed.
        """
        require_writable(self.run_dir.path)
        others = queued_jobs(self.run_dir.jobs)
        if others and (self.restart or self.redo is not None or any(map(is_step, others))):
            raise ConfigError(
                f"{describe_jobs(others)} of this dataset are still in the queue; "
                f"wait for them (sharmill status {self.config.run_dir}) or scancel them"
            )
        if others:
            # Ranks whose next step is gone, or was never submitted: what they do is not lost.
            return self._go_on_behind(others)
        for stage in self._make_stages():
            remove_tree(stage.dir.attempts)
            remove_tree(stage.dir.rounds)
        try:
            return self._step(wait_seconds=0.0)
        except FatalError as error:
            self._write_failure(error)
            raise

    def __call__(self) -> None:
        """A later step, in a job of its own."""
        self.run_dir.jobs.mkdir(parents=True, exist_ok=True)
        with logging_to(self.run_dir.jobs / "chain.log"):
            try:
                state = self._next_step()
            except SharmillError as error:
                self._write_failure(error)
                raise
            if state is None:
                return
            log.info("%s: %s", state.state, state.message)
        if state.state == "failed":
            raise FatalError(state.message)

    def _next_step(self) -> ChainState | None:
        """None if a later step is in the queue already: this one was requeued after it had submitted that."""
        own = int(os.environ.get("SLURM_JOB_ID", 0))
        # The step before this one may not have quite ended.
        others = [job for job in queued_jobs(self.run_dir.jobs) if not is_step(job) or job.number > own]
        if any(map(is_step, others)):
            log.info("%s go on", describe_jobs(others))
            return None
        if others:
            return self._go_on_behind(others)
        return self._step(wait_seconds=_SECONDS_TO_WAIT_FOR_LOCK)

    def _go_on_behind(self, others: Sequence[QueuedJob]) -> ChainState:
        """Leaves the work to jobs that are in the queue already, and only submits the step behind them."""
        with locked(self.run_dir, _SECONDS_TO_WAIT_FOR_LOCK):
            step = self._executor().go_on_behind(others)
            message = f"{describe_jobs(others)} are still in the queue, continued by job {step}"
            state = ChainState(state="waiting", message=message, jobs=[*(job.id for job in others), step])
            self._write(state)
        return state

    def _step(self, wait_seconds: float) -> ChainState:
        state = self._run_stages(wait_seconds)
        if state.state != "waiting":
            self._write(state)
        return state

    def _run_stages(self, wait_seconds: float) -> ChainState:
        try:
            result = self._run_dataset(wait_seconds)
        except Submitted as handed_over:
            return _waiting_for(handed_over)
        if not result.ok:
            stage, outcome = result.stages[-1]
            named = "; ".join(f"unit {error.index}: {error.message}" for error in list(outcome.failures.values())[:3])
            message = f"{stage.name}: {len(outcome.failures)} units failed ({named}); tracebacks: {stage.dir.failures}"
            return ChainState(state="failed", message=message)
        errors = result.report.errors if result.report else 0
        return ChainState(state="done", message="all stages are done", findings=errors)

    def _make_stages(self) -> list[Stage]:
        return make_stages(self.config, self.stages)

    def _run_dataset(self, wait_seconds: float) -> DatasetResult:
        return run_dataset(
            self.config, LogListener(), stages=self.stages, restart=self.restart, executor=self._executor(),
            wait_seconds=wait_seconds, redo=self.redo,
        )  # fmt: skip

    def _executor(self) -> SlurmExecutor:
        # Only the first step takes back what was done.
        following = replace(self, restart=False, redo=None)
        return SlurmExecutor(
            self.profile, self.run_dir.jobs, following, self.config.name, self.config.max_reject_fraction,
            note=lambda handed_over: self._write(_waiting_for(handed_over)),
        )  # fmt: skip

    def _write_failure(self, error: SharmillError) -> None:
        self._write(ChainState(state="failed", message=str(error)))

    def _write(self, state: ChainState) -> None:
        write_atomic(self.run_dir.chain, msgspec.json.encode(state) + b"\n")


def _waiting_for(handed_over: Submitted) -> ChainState:
    jobs = [*handed_over.ranks, handed_over.continuation]
    return ChainState(state="waiting", message=str(handed_over), jobs=jobs)


def read_state(run_dir: RunDir) -> ChainState | None:
    """How far the chain of a run directory has got; None where there is none."""
    if not run_dir.chain.exists():
        return None
    return msgspec.json.decode(run_dir.chain.read_bytes(), type=ChainState)


def wait_for_end(chain: Chain) -> ChainState:
    """Waits until a chain is done or has failed.

    Raises:
        FatalError: its jobs are gone and it has not come to an end, as after scancel of a step.
    """
    next_question = 0.0
    while True:
        state = read_state(chain.run_dir)
        assert state is not None
        if state.state != "waiting":
            return state
        if time.monotonic() >= next_question:
            next_question = time.monotonic() + _SECONDS_BETWEEN_QUESTIONS
            if _is_deserted(chain, state):
                raise FatalError(
                    f"the jobs have ended before the work did; see {chain.run_dir.jobs}, and submit again to go on"
                )
        time.sleep(_POLL_SECONDS)


def _is_deserted(chain: Chain, state: ChainState) -> bool:
    """Whether no job is left that could bring the chain on. Asked twice: its last step may just have ended."""
    for _ in range(2):
        try:
            if queued_jobs(chain.run_dir.jobs):
                return False
        except SlurmSilent as error:
            log.warning("%s", error)
            return False
        time.sleep(_POLL_SECONDS)
        if read_state(chain.run_dir) != state:
            return False
    return True


class LogListener(Listener):
    """Notes in the log what happens; nobody watches a step."""

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        log.info("%s: %d of %d units are done", stage.name, len(done), len(units))

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        log.info("unit %d is done", unit.index)

    def unit_failed(self, unit: Unit, error: FailedAttempt, attempts: int) -> None:
        log.warning("unit %d failed %d times: %s", unit.index, attempts, error.message)

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        log.info("%s: %s", stage.name, "done" if result.ok else f"{len(result.failures)} units failed")
