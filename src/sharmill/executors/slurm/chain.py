"""A dataset on SLURM, from stage to stage without a process that has to wait: each driver job submits the next.

A driver job runs the stages as they stand: what is complete is finalized, what is missing is submitted with the next
driver job behind it. The driver jobs of a dataset are its chain. Each dataset has its own, so that a slow one does not
hold up another.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import FailedAttempt, StageResult, Submitted
from sharmill.engine.run import Executor, locked
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.executors.logs import logging_to
from sharmill.executors.slurm.executor import SlurmExecutor, describe_jobs, is_driver_job
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.executors.slurm.queue import QueuedJob, SlurmSilent, queued_jobs
from sharmill.storage import remove_tree, require_writable, write_atomic

log = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
_SECONDS_BETWEEN_QUESTIONS = 10.0
# A driver job may begin before the one that submitted it has left the run directory.
_SECONDS_TO_WAIT_FOR_LOCK = 600.0


class Outcome(Protocol):
    """The interface of the result of a run over a dataset."""

    @property
    def stages(self) -> Sequence[tuple[Stage, StageResult]]:
        """The stages that were run, in order, and how each ended."""

    @property
    def num_errors(self) -> int:
        """The errors that the checker found in the dataset."""


class ChainedDataset(Protocol):
    """The interface of a dataset with the stages that a chain runs over it; picklable."""

    @property
    def name(self) -> str: ...

    @property
    def run_dir(self) -> Path: ...

    def make_stages(self) -> list[Stage]:
        """Return the stages in the order in which they run."""

    def run(self, executor: Executor, listener: Listener, *, restart: bool, wait_seconds: float) -> Outcome:
        """Run the stages until one fails or is submitted; wait so long for the run directory to be free."""


class ChainState(msgspec.Struct, kw_only=True):
    """State of a chain. ``jobs`` are those that the last driver job submitted."""

    state: Literal["waiting", "done", "failed"]
    message: str
    jobs: list[str] = []
    findings: int = 0


@dataclass(frozen=True)
class Chain:
    """The chain of one dataset; as a callable, its next driver job."""

    dataset: ChainedDataset
    profile: ClusterProfile
    restart: bool = False

    @property
    def name(self) -> str:
        return self.dataset.name

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.dataset.run_dir.absolute())

    def executor(self) -> SlurmExecutor:
        """Return the executor that submits this chain's jobs."""
        # Only the first run begins anew.
        driver_job = replace(self, restart=False)
        return SlurmExecutor(self.profile, self.run_dir.jobs, driver_job, self.name)

    def require_no_jobs(self) -> None:
        """Raise ConfigError if jobs of this dataset are in the queue."""
        if others := queued_jobs(self.run_dir.jobs):
            raise ConfigError(
                f"{describe_jobs(others)} of this dataset are still in the queue; "
                f"wait for them (sharmill status {self.dataset.run_dir}) or scancel them",
                code="jobs_in_queue",
            )

    def start(self) -> ChainState:
        """Run the stages in this process, which plans and submits. Units that were given up before are tried again.

        Raises:
            ConfigError: the configuration is wrong, or this dataset has a chain in the queue.
            FatalError: a stage stopped.
        """
        require_writable(self.run_dir.path)
        others = queued_jobs(self.run_dir.jobs)
        if self.restart or any(map(is_driver_job, others)):
            self.require_no_jobs()
        elif others:
            # Ranks whose driver job is gone, or was never submitted: let them finish, for their work counts.
            return self._submit_driver_job(others)
        for stage in self.dataset.make_stages():
            remove_tree(stage.dir.attempts)
            remove_tree(stage.dir.rounds)
        try:
            return self._run_stages(wait_seconds=0.0)
        except FatalError as error:
            self._write_failure(error)
            raise

    def __call__(self) -> None:
        """Run the stages in a driver job."""
        self.run_dir.jobs.mkdir(parents=True, exist_ok=True)
        with logging_to(self.run_dir.chain_log):
            try:
                state = self._run_driver_job()
            except SharmillError as error:
                self._write_failure(error)
                raise
            if state is None:
                return
            log.info("%s: %s", state.state, state.message)
        if state.state == "failed":
            raise FatalError(state.message, code="units_failed")

    def _run_driver_job(self) -> ChainState | None:
        """Return None if a later driver job is in the queue: then this one was requeued after it had submitted that."""
        own = int(os.environ.get("SLURM_JOB_ID", 0))
        # The driver job before this one may not have quite ended.
        others = [job for job in queued_jobs(self.run_dir.jobs) if not is_driver_job(job) or job.number > own]
        if any(map(is_driver_job, others)):
            log.info("%s go on", describe_jobs(others))
            return None
        if others:
            return self._submit_driver_job(others)
        return self._run_stages(wait_seconds=_SECONDS_TO_WAIT_FOR_LOCK)

    def _submit_driver_job(self, behind: Sequence[QueuedJob]) -> ChainState:
        """Leave the work to jobs that are in the queue already, and only submit the driver job behind them."""
        with locked(self.run_dir, _SECONDS_TO_WAIT_FOR_LOCK):
            driver_job = self.executor().submit_driver_job(behind)
            message = f"{describe_jobs(behind)} are still in the queue, then driver job {driver_job}"
            state = ChainState(state="waiting", message=message, jobs=[*(job.id for job in behind), driver_job])
            self._write(state)
        return state

    def _run_stages(self, wait_seconds: float) -> ChainState:
        outcome = self.dataset.run(
            self.executor(), _ChainListener(self), restart=self.restart, wait_seconds=wait_seconds
        )
        if not outcome.stages:
            state = ChainState(state="done", message="there is no stage to run")
            self._write(state)
            return state
        stage, result = outcome.stages[-1]
        if result.submitted is not None:
            # The listener has written this while the run directory was locked.
            return _waiting_for(result.submitted)
        if result.ok:
            state = ChainState(state="done", message="all stages are done", findings=outcome.num_errors)
        else:
            named = "; ".join(f"unit {error.index}: {error.message}" for error in list(result.failures.values())[:3])
            message = f"{stage.name}: {len(result.failures)} units failed ({named}); tracebacks: {stage.dir.failures}"
            state = ChainState(state="failed", message=message)
        self._write(state)
        return state

    def _write_failure(self, error: SharmillError) -> None:
        self._write(ChainState(state="failed", message=str(error)))

    def _write(self, state: ChainState) -> None:
        write_atomic(self.run_dir.chain, msgspec.json.encode(state) + b"\n")


class _ChainListener(Listener):
    """Notes in the log what happens, and in the chain's state what is submitted.

    That has to be written while this process still holds the run directory's lock: the driver job, which takes the lock
    as well, may otherwise have written a later state before.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        log.info("%s: %d of %d units are done", stage.name, len(done), len(units))

    def unit_failed(self, unit: Unit, error: FailedAttempt, attempts: int) -> None:
        log.warning("unit %d failed %d times: %s", unit.index, attempts, error.message)

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        if result.submitted is not None:
            self._chain._write(_waiting_for(result.submitted))
            log.info("%s", result.submitted.message)
        else:
            log.info("%s: %s", stage.name, "done" if result.ok else f"{len(result.failures)} units failed")


def _waiting_for(submitted: Submitted) -> ChainState:
    return ChainState(state="waiting", message=submitted.message, jobs=submitted.jobs)


def read_state(run_dir: RunDir) -> ChainState | None:
    """Return how far the chain of a run directory has got; None where there is none."""
    if not run_dir.chain.exists():
        return None
    return msgspec.json.decode(run_dir.chain.read_bytes(), type=ChainState)


def wait_for_end(chain: Chain) -> ChainState:
    """Wait until a chain is done or has failed.

    Raises:
        FatalError: its jobs are gone and it has not come to an end, as after scancel of a driver job.
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
                    f"the jobs have ended before the work did; see {chain.run_dir.jobs}, and submit again to go on",
                    code="jobs_gone",
                )
        time.sleep(_POLL_SECONDS)


def _is_deserted(chain: Chain, state: ChainState) -> bool:
    """Return True if no job is left that could continue the chain. Asked twice: its last job may just have ended."""
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
