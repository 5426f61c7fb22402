"""A dataset on SLURM, from stage to stage without a process that has to wait: each driver job submits the next.

A driver job runs the stages as they stand: what is complete is finalized, what is missing is submitted with the next
driver job behind it. The driver jobs of a dataset are its chain. Each dataset has its own, so that a slow one does not
hold up another.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from sharmill.engine.attempts import describe_slots_out
from sharmill.engine.fence import release_run
from sharmill.engine.host import user_name
from sharmill.engine.late_views import wait_for_stage
from sharmill.engine.listener import Listener
from sharmill.engine.locks import lock_owner
from sharmill.engine.outcomes import StageResult, Submitted
from sharmill.engine.patience import Patience
from sharmill.engine.run import Executor, locked
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.executors.logs import logging_to
from sharmill.executors.signals import ToldToEnd, ended_by_sigterm
from sharmill.executors.slurm.chain_end import lines_that_note_failure, notify
from sharmill.executors.slurm.chain_state import (
    ChainState,
    read_state,
    require_no_chain,
    require_not_withdrawn,
    require_same_cluster,
)
from sharmill.executors.slurm.executor import SlurmExecutor
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.executors.slurm.queue import (
    PATIENCE_SECONDS,
    QueuedJob,
    cluster_name,
    competing_jobs,
    describe_jobs,
    make_run_id,
    queued_jobs,
    requeue,
    require_slurm,
    scancel,
)
from sharmill.storage import make_private_folder, remove_asides, remove_tree, write_atomic

log = logging.getLogger(__name__)

# The one that submitted a driver job may not have left the run directory yet. One that a node starts twice, or that is
# requeued from a node out of reach, waits as long as its other process is at work, for that may not come to its end.
_SECONDS_TO_WAIT_FOR_LOCK = math.inf
# A controller that is away, or limits on jobs in the queue, are waited for as long as this: by one driver job after the
# other, since each has a time limit.
_DRIVER_PATIENCE_SECONDS = 12 * 3600.0
# It may have to wait for three answers.
_SHARE_OF_TIME_LIMIT = 0.3


class Outcome(Protocol):
    """The interface of the result of a run over a dataset."""

    @property
    def stages(self) -> Sequence[tuple[Stage, StageResult]]:
        """The stages that were run, in order, and how each ended."""

    @property
    def num_errors(self) -> int:
        """The errors that the checker found in the dataset."""

    @property
    def appended(self) -> str:
        """A sentence about the append to another dataset, "" where nothing was appended."""


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

    def show(self) -> None:
        """Show to people what has been made, once all is done."""


@dataclass(frozen=True)
class JobChain:
    """The chain of one dataset; as a callable, its next driver job.

    A driver job that does not end well has a watcher job behind it, which is a driver job that goes on in its place:
    once, since what ends that one as well will not pass. ``command`` submits the chain again. ``take_over``: the user
    says that no jobs are left on another cluster.
    """

    dataset: ChainedDataset
    profile: ClusterProfile
    restart: bool = False
    command: str = ""
    is_watcher: bool = False
    patience: float = PATIENCE_SECONDS
    take_over: bool = False

    @property
    def name(self) -> str:
        return self.dataset.name

    @property
    def run_dir(self) -> RunDir:
        # Job scripts name it: a link may lead elsewhere by then.
        return RunDir(self.dataset.run_dir.resolve())

    def executor(self, small_stages: Literal["driver", "ranks", "here"] = "driver") -> SlurmExecutor:
        """Return the executor that submits this chain's jobs; see its ``small_stages``."""
        # Only the first run begins anew.
        patience = _SHARE_OF_TIME_LIMIT * 60.0 * self.profile.for_stage("driver", uses_gpu=False).timeout_min
        driver_job = replace(self, restart=False, is_watcher=False, patience=min(patience, _DRIVER_PATIENCE_SECONDS))
        watcher_job = replace(driver_job, is_watcher=True)
        setup = lines_that_note_failure(self.run_dir, self.command)
        return SlurmExecutor(
            self.profile, self.run_dir, driver_job, watcher_job, self.name, setup, self.patience, small_stages,
            self._note_submitted,
        )  # fmt: skip

    def start(self) -> ChainState:
        """Run the stages in this process, which plans and submits. Units that were given up before are tried again.

        Raises:
            ConfigError: the configuration is wrong, or this dataset has a chain in the queue.
            FatalError: a stage stopped.
        """
        require_slurm()
        if "%" in str(self.run_dir.path):
            message = f"run_dir {self.run_dir.path} has a '%' in it, which SLURM and submitit replace; choose another"
            raise ConfigError(message, code="bad_config_value")
        with locked(self.run_dir):
            make_run_id(self.run_dir)
            others = competing_jobs(self.run_dir)
            if not others and not self.take_over:
                require_same_cluster(self.run_dir)
            if self.restart or any(job.role != "rank" for job in others):
                require_no_chain(self.run_dir, take_over=self.take_over)
            elif others:
                # Ranks whose driver job is gone, or was never submitted: let them finish, for their work counts.
                message = f"{describe_jobs(others)} are still in the queue"
                self._write(ChainState(state="waiting", message=message, jobs=[job.id for job in others]), begins=True)
                return self._submit_driver_job(others)
            remove_asides(self.run_dir.path, {self.run_dir.chain.name})
            for stage in self.dataset.make_stages():
                remove_tree(stage.dir.attempts)
                remove_tree(stage.dir.rounds)
            by = f"process {os.getpid()} of {user_name()} on {socket.gethostname()}"
            message = f"the first jobs are being submitted by {by}"
            state = ChainState(state="waiting", message=message, submitting=True, cluster=cluster_name())
            begun = self._write(state, begins=True)
        try:
            return self._run_stages(self.executor(), wait_seconds=0.0)
        except BaseException as error:
            # Jobs that are in the queue and noted go on, and another submission notes its own state.
            if read_state(self.run_dir) == begun:
                self._note_end(error, state="failed")
            raise

    def __call__(self, stage: str = "", token: str = "", *, had_ranks: bool = True) -> None:
        """Run the stages in a driver job, or in a watcher job if the driver job before it has noted no end.

        Args:
            stage: the name of the stage that was planned before this job was submitted, "" where that is not known.
            token: the token of its plan.
            had_ranks: that ranks of that plan have ended.
        """
        make_private_folder(self.run_dir.jobs)
        with logging_to(self.run_dir.chain_log):
            began = time.monotonic()
            try:
                with ended_by_sigterm():
                    stages = self.dataset.make_stages()
                    patience = Patience(max((one.seconds_until_seen for one in stages), default=0.0))
                    before = patience.once_seen(lambda: read_state(self.run_dir))
                    if self.is_watcher and before is not None and before.state != "waiting":
                        return
                    if stage:
                        wait_for_stage(stages, stage, token, had_ranks=had_ranks)
                    state = self._run_driver_job()
            except SystemExit:
                # Told to leave, and requeued.
                raise
            except ToldToEnd:
                log.warning("job %s is told to end", os.environ.get("SLURM_JOB_ID"))
                sys.exit(128 + signal.SIGTERM)
            except BaseException as error:
                log.exception("job %s ends", os.environ.get("SLURM_JOB_ID"))
                if isinstance(error, FatalError) and error.code == "locked":
                    # The process that has taken the run directory over notes what becomes of the chain.
                    raise
                is_waiting = time.monotonic() - began >= self.patience and self._may_wait_on(error)
                if is_waiting and requeue(os.environ["SLURM_JOB_ID"], max(self.patience, PATIENCE_SECONDS)):
                    self._note_end(error, state="waiting", then="it is requeued and waits on")
                    return
                failed = self.is_watcher or (isinstance(error, SharmillError) and not is_waiting)
                self._note_end(error, state="failed" if failed else "waiting")
                raise
            if state is None:
                return
            log.info("%s: %s", state.state, state.message)
        if state.state == "failed":
            raise FatalError(state.message, code="units_failed")

    def _may_wait_on(self, error: BaseException) -> bool:
        """Return True if the error is that SLURM does not answer or takes no jobs, and that not for half a day yet."""
        waited = self.patience * (1 + int(os.environ.get("SLURM_RESTART_COUNT", "0")))
        return (
            isinstance(error, SharmillError)
            and error.code in ("silent_cluster", "jobs_refused")
            and waited < _DRIVER_PATIENCE_SECONDS
        )

    def _run_driver_job(self) -> ChainState | None:
        """Return None if a later driver job is in the queue: that goes on.

        Then this one was requeued after it had submitted that, or is one of which its submission never heard.
        """
        require_not_withdrawn(self.run_dir)
        others = competing_jobs(self.run_dir, self.patience)
        if not others:
            # Behind a watcher job is no other, so it is to be short.
            executor = self.executor("ranks" if self.is_watcher else "here")
            try:
                return self._run_stages(executor, wait_seconds=_SECONDS_TO_WAIT_FOR_LOCK)
            except ConfigError as error:
                # They may have been submitted while this one waited for the run directory.
                if error.code != "jobs_in_queue" or not (others := competing_jobs(self.run_dir, self.patience)):
                    raise
        if any(job.role == "driver" for job in others):
            log.info("%s go on", describe_jobs(others))
            return None
        with locked(self.run_dir, _SECONDS_TO_WAIT_FOR_LOCK):
            require_not_withdrawn(self.run_dir)
            return self._submit_driver_job(others)

    def _submit_driver_job(self, behind: Sequence[QueuedJob]) -> ChainState:
        """Leave the work to jobs that are in the queue already, and only submit the driver job behind them."""
        executor = self.executor()
        # Ranks are of the first stage that is not finished.
        driver_job = executor.submit_driver_job(behind, self._first_unfinished())
        message = f"{describe_jobs(behind)} are still in the queue, then driver job {driver_job}"
        state = ChainState(state="waiting", message=message, jobs=[*(job.id for job in behind), driver_job])
        self._write(state)
        return state

    def _first_unfinished(self) -> Stage | None:
        return next((stage for stage in self.dataset.make_stages() if not stage.dir.done.exists()), None)

    def _run_stages(self, executor: SlurmExecutor, wait_seconds: float) -> ChainState:
        outcome = self.dataset.run(executor, _ChainListener(), restart=self.restart, wait_seconds=wait_seconds)
        if not outcome.stages:
            state = ChainState(state="done", message="there is no stage to run")
            self._write(state)
            return state
        stage, result = outcome.stages[-1]
        if result.submitted is not None:
            # The executor has noted this while the run directory was locked.
            return _waiting_for(result.submitted)
        if result.ok:
            errors = [sentence for stage, _ in outcome.stages for sentence in describe_slots_out(stage.dir)]
            message = "; on the way: ".join(["all stages are done", *errors])
            message += f"; {outcome.appended}" if outcome.appended else ""
            state = ChainState(state="done", message=message, findings=outcome.num_errors)
        else:
            named = "; ".join(f"unit {error.index}: {error.message}" for error in list(result.failures.values())[:3])
            message = f"{stage.name}: {len(result.failures)} units failed ({named}); tracebacks: {stage.dir.failures}"
            state = ChainState(state="failed", message=message)
        self._write(state)
        if state.state == "done":
            # Last of all: the chain is done, whatever becomes of this.
            self.dataset.show()
        return state

    def _note_submitted(self, submitted: Submitted) -> None:
        """Note what was submitted.

        This process still holds the run directory's lock: the driver job, which takes the lock as well, may otherwise
        have written a later state before.
        """
        self._write(_waiting_for(submitted))

    def _note_end(
        self, error: BaseException, state: Literal["waiting", "failed"], then: str = "its watcher job goes on"
    ) -> None:
        """Note an error that ends this process; if another job is to go on, the state is that of waiting for it."""
        message = "; ".join(error.lines) if isinstance(error, SharmillError) else f"{type(error).__name__}: {error}"
        if state == "waiting":
            message = f"driver job {os.environ.get('SLURM_JOB_ID')} ended with {message}; {then}"
        # On a disk that takes no note the log and the queue have to tell.
        with suppress(SharmillError, OSError):
            self._write(ChainState(state=state, message=message))

    def _write(self, state: ChainState, *, begins: bool = False) -> ChainState:
        """Note a state, with the command of this chain, and return it.

        Args:
            begins: that this is the first of a submission; else a chain that a user has ended stays so.
        """
        if not begins:
            require_not_withdrawn(self.run_dir)
        before = read_state(self.run_dir)
        cluster = state.cluster or (before.cluster if before is not None else "")
        state = msgspec.structs.replace(state, command=self.command, cluster=cluster)
        write_atomic(self.run_dir.chain, msgspec.json.encode(state) + b"\n")
        if state.state != "waiting":
            # Another process may have taken over meanwhile.
            if lock_owner(self.run_dir.path) is None:
                release_run(self.run_dir)
            # The watcher job of a driver job that has noted its end has nothing to do.
            with suppress(SharmillError):
                scancel([job.id for job in queued_jobs(self.run_dir) if job.role == "watcher"])
            if before is None or before.state != state.state:
                notify(self.profile, self.name, self.run_dir, state)
        return state


class _ChainListener(Listener):
    """Notes in the log what happens."""

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        log.info("%s: %d of %d units are done", stage.name, len(done), len(units))

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        if result.submitted is not None:
            log.info("%s", result.submitted.message)
        else:
            log.info("%s: %s", stage.name, "done" if result.ok else f"{len(result.failures)} units failed")


def _waiting_for(submitted: Submitted) -> ChainState:
    return ChainState(state="waiting", message=submitted.message, jobs=submitted.jobs)
