"""The SLURM executor, based on submitit: each task of a job array is one rank, and no process waits for the ranks.

``SlurmExecutor`` advances a dataset from stage to stage: it finalizes complete stages and submits the missing units of
the next one. After each job array it submits a driver job, which does the same once the ranks have ended, and then a
backup driver job, which replaces the driver job only if the driver job fails. The state of a run is derived from its
plans, its ledgers and the queue; only the request and the outcome are recorded. A driver job processes small stages
itself, like the local executor, because they are not worth a wait in the queue.
"""

import logging
import math
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tenacity import retry_if_exception_message, retry_if_exception_type

from sharmill.config.loading import check_one_line
from sharmill.engine.attempts import MAX_FAILURES, Attempts
from sharmill.engine.executor import Executor, Listener, StageResult, Submitted, Unlocked
from sharmill.engine.fence import is_current, refuse_copy, release, superseded, wait_for_plan
from sharmill.engine.launch import (
    Launch,
    begin_launch,
    end_attempts,
    find_live,
    find_workers,
    has_seen_ends,
    read_attempts,
)
from sharmill.engine.lead import Leader
from sharmill.engine.plan import find_outstanding, has_output, read_ledger
from sharmill.engine.run_dir import RunDir, RunOutcome, RunRequest
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Unit
from sharmill.errors import ConfigError, FatalError, SharmillError, counted, one_line
from sharmill.executors.local import LocalExecutor
from sharmill.executors.slurm import queue
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.supervisor import Device, logging_to, supervise_rank
from sharmill.files.atomic import remove
from sharmill.files.host import deferred_interrupts, ended_by_sigterm, limit_cores
from sharmill.files.locks import lock_owner
from sharmill.files.shared_disk import VisibilityTimeout
from sharmill.files.stored import load_record, read_stored
from sharmill.files.trust import make_private_folder
from sharmill.registry import describe_missing

log = logging.getLogger(__name__)

# Errors of sbatch that may be temporary: a busy controller, or a limit on queued jobs. All other errors concern the
# request.
_MAY_PASS = r"(?is).*(timed out|temporarily|unable to contact|connection|communicat|(?:Max|Grp)Submit\w*Limit)"
# Longest time to wait for an unreachable controller, or for a limit on queued jobs, in seconds. A driver job waits
# for a part of this time, and is then requeued.
_MOST_PATIENCE_SECONDS = 12 * 3600.0
_MOST_LOGS = 50
_SETUP_FAILED = "sharmill: the setup line failed with status "
# Pattern of the message about a missing module, from a traceback or from ``python -m``, at the end of a log. A message
# from srun, which names the node, may follow.
_NO_MODULE = re.compile(
    r"^(?:.*\()?ModuleNotFoundError: No module named '([\w.]+)'\)?\s*"
    r"(?:^srun: (?:error: ([^:\s]+): task \d+: Exited|(?!error)).*\s*)*\Z",
    re.MULTILINE,
)
_SAYS_WHY = re.compile(
    r"(?!\s|submitit ).*(error|exception|not ?found|no such|denied|cannot|could not|unable|fail|killed)", re.IGNORECASE
)


class Dataset(Protocol):
    """The dataset and its stages, as the SLURM executor uses them; picklable."""

    @property
    def name(self) -> str:
        """The prefix for the names of its jobs."""

    @property
    def run_dir(self) -> Path:
        """Its run directory."""

    def make_stages(self) -> list[StageRun]:
        """Return the stages in the order in which they run."""

    def run(self, executor: "SlurmExecutor", *, restart: bool, wait_seconds: float) -> RunOutcome | Submitted:
        """Run the stages until one fails or is submitted; wait up to ``wait_seconds`` for the lock of the run."""

    def ranks_of_use(self, stage: StageRun, units: Sequence[Unit]) -> int:
        """Return the number of ranks for which the units of a stage provide enough work."""

    def show(self) -> None:
        """Write the report page, once all stages are finished."""


@dataclass
class RankTask:
    """A task of a job array, which is the supervisor of one rank; picklable, and called on the node.

    If the task is told to stop, because of preemption or its time limit, its rank releases its unit, and the task is
    requeued.
    """

    stage: StageRun
    number: int
    ranks: RankProfile

    def __call__(self) -> None:
        """Process units until the stage ends. It is not an error if another run has finished or restarted the stage."""
        stage, device = self.stage, Device.given(self.ranks.device)
        # Limit the cores here, because not every cluster binds tasks to their cores.
        limit_cores(self.ranks.cores)
        try:
            with ended_by_sigterm():
                watcher = supervise_rank(stage, device, self.number, job_seconds=60.0 * self.ranks.timeout_min)
        except (FatalError, FileNotFoundError):
            if is_current(stage):
                raise
            log.warning("rank %d stops: %s", self.number, superseded(stage))
            return
        # Only the leader cancels other tasks, so that the number of requests to the scheduler does not grow with the
        # number of ranks.
        leader, array = watcher.leader, os.environ.get("SLURM_ARRAY_JOB_ID")
        if leader is not None and watcher.state.ended and array is not None:
            self._end_others(array, leader)

    def _end_others(self, array: str, leader: Leader) -> None:
        """Cancel pending tasks and tasks whose ranks are silent, because the driver job waits for all tasks to end."""
        first = self.number - int(os.environ["SLURM_ARRAY_TASK_ID"])
        silent = [number - first for number in leader.silent_ranks() if number >= first]
        queue.scancel([array], "--state=PENDING")
        queue.scancel([f"{array}_{task}" for task in silent])

    def checkpoint(self) -> Any:
        """Return the task to requeue; submitit calls this before it ends a task that must stop."""
        from submitit.helpers import DelayedSubmission

        log.warning("rank %d is told to stop", self.number)
        # On preemption or at the time limit, SLURM may send SIGTERM at once. Ignore it until the task is requeued.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return DelayedSubmission(self)


@dataclass
class SlurmExecutor(Executor):
    """The run of one dataset on SLURM, from stage to stage. Its jobs run a pickled copy of this object.

    All nodes must share the file system of the run directory.

    Attributes:
        dataset: the dataset with its stages.
        profile: the cluster profile.
        command: the command that submits the run again.
        profile_file: the file with the profile, "" for the default profile.
        restart: True if the output of the stages is discarded first.
        take_over: True if the user has confirmed that no jobs are left on another cluster.
        patience: seconds to keep trying if SLURM does not answer or accepts no jobs.
        role: the role of the job in which this process runs; None if it does not run in a job.
        given: the request of the run. Jobs compare it with the run directory, to notice that another run has started.
    """

    waits: ClassVar[bool] = False
    dataset: Dataset
    profile: ClusterProfile
    command: str = ""
    profile_file: str = ""
    restart: bool = False
    take_over: bool = False
    patience: float = queue.PATIENCE_SECONDS
    role: queue.Role | None = None
    given: RunRequest = field(default_factory=lambda: RunRequest(stages=[]))
    run_dir: RunDir = field(init=False)

    def __post_init__(self) -> None:
        # Resolve links now, because they may point elsewhere when a job starts.
        path = self.dataset.run_dir.resolve()
        check_one_line(str(path), "the path of the run directory")
        if "%" in str(path):
            raise ConfigError(
                f"run_dir {path} contains '%', which SLURM and submitit would replace; choose another path",
                code="bad_config_value",
            )
        self.run_dir = RunDir(path)

    def start(self) -> RunOutcome | Submitted:
        """Plan and submit the stages from this process. Units that were given up earlier are tried again.

        Raises:
            ConfigError: the configuration is wrong, or this dataset has driver jobs in the queue.
            FatalError: a stage stopped.
        """
        if not (cluster := queue.setting("ClusterName")):
            raise ConfigError("no SLURM cluster was found: submit from a login node of a cluster", code="no_cluster")
        refuse_copy(self.run_dir)
        kinds = dict.fromkeys(stage.kind for stage in self.dataset.make_stages())
        self.given = RunRequest(
            stages=list(kinds), folder=str(Path.cwd()), run=str(self.run_dir.path.resolve()), command=self.command,
            cluster=cluster,
        )  # fmt: skip
        return self._run_stages(wait_seconds=0.0)

    def find_jobs(self, run_dir: RunDir) -> list[queue.QueuedJob] | None:
        if self.role is not None:
            self.require_current()
            return None
        if self.restart:
            queue.require_no_jobs(run_dir, take_over=self.take_over)
        return queue.queued_jobs(run_dir, self.patience, on_any_cluster=self.take_over)

    def begin(self, run_dir: RunDir, request: RunRequest, jobs: Sequence[queue.QueuedJob], *, is_joining: bool) -> None:
        if any(job.role != "rank" for job in jobs):
            return  # the driver jobs continue the run, and this process only adds ranks
        run_dir.begin(self.given)
        # Forget earlier attempts, unless ranks are still at work and only their driver job is missing.
        for stage in self.dataset.make_stages() if not (jobs or is_joining) else ():
            remove(stage.ranks.launch)

    def run(
        self, stage: StageRun, units: Sequence[Unit], listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> StageResult:  # fmt: skip
        """Submit ranks for the units, or return the failed units if all others are complete; see ``Executor``.

        If a driver job is already in the queue, this process only adds ranks, or does nothing if it is a driver job
        itself. A driver job processes small stages itself; if it is killed, the next driver job submits ranks for
        them.

        Raises:
            FatalError: a rank stopped the stage, ranks end without starting a unit, SLURM refuses the jobs, or a user
                has cancelled the run.
        """
        self.run_dir.require_not_cancelled()
        others = self._competing_jobs()
        message, ids = f"{queue.describe_jobs(others)} are still in the queue", [job.id for job in others]
        is_advanced = any(job.role == "advance" for job in others)
        was_launched = stage.ranks.launch.exists()
        if is_advanced and (self.role is not None or not was_launched):
            return StageResult(submitted=Submitted(message, ids))
        if others and not is_advanced:
            return self._submit(stage, message, behind=ids)
        is_joining = is_advanced or bool(find_live(stage.dir, stage.options.lease_seconds, ranks=False))
        left = list(units)
        if not is_joining:
            attempts = end_attempts(stage, {unit.index for unit in units})
            if attempts.stopped is not None:
                raise attempts.stopped
            left = [unit for unit in units if not attempts.is_given_up(unit.index, ())]
            if not left:
                return StageResult(failures={unit.index: attempts.error(unit.index) for unit in units})
            if was_launched:
                self._require_progress(stage, attempts)
        workers = 0 if was_launched else self.workers_in_job(stage, left)
        if not workers:
            numbers = begin_launch(
                stage,
                left,
                self.num_ranks(stage, left),
                join_seconds=stage.options.lease_seconds,
                keeps_attempts=was_launched,
                is_joining=is_joining,
            )
            ranks = counted(len(numbers), "more rank" if is_joining else "rank")
            message = f"{stage.name}: {counted(len(left), 'unit')} on {ranks}"
            return self._submit(stage, message, numbers, is_advanced=is_advanced)
        if self.role != "advance":
            return self._submit(stage, f"{stage.name}: {counted(len(left), 'unit')}, which need no ranks")
        log.info("%s: %d units are processed in this job, by %d workers", stage.name, len(left), workers)
        limit_cores(self.profile.driver.cores)
        return LocalExecutor(workers, device="cpu").run(stage, left, listener, unlocked)

    def _competing_jobs(self) -> list[queue.QueuedJob]:
        """Return the queued jobs that conflict with new ranks of this process.

        If this process is a driver job, these are ranks and later driver jobs; earlier driver jobs are about to end.
        """
        found = queue.queued_jobs(self.run_dir, self.patience, on_any_cluster=True)
        if self.role is None:
            return found
        own = int(os.environ["SLURM_JOB_ID"])
        return [job for job in found if job.role == "rank" or (job.role == "advance" and int(job.id) > own)]

    def _require_progress(self, stage: StageRun, attempts: Attempts) -> None:
        """Raise FatalError if ranks end again and again without any progress, since the run would never end."""
        launch = load_record(stage.ranks.launch, Launch)
        if (error := attempts.error_of_all(len(launch.bins))) is not None:
            raise error
        begun = stage.ranks.launch.stat().st_mtime
        # Ranks that fail on import leave no notes, so search their logs.
        lacking = find_missing_module(self.run_dir.jobs, begun, len(launch.bins)) if not attempts.num_ended else ""
        if lacking:
            raise FatalError(f"{stage.name}: no rank can start: {lacking}", code="missing_package")
        before = launch.begun
        if len(before) < MAX_FAILURES or set(before[-MAX_FAILURES:]) != {attempts.num_ended}:
            return
        if attempts.excluded_slots():
            raise attempts.all_excluded_error(stage.name, stage.dir.logs)
        reason = find_reason(self.run_dir.jobs, begun)
        raise FatalError(
            f"{stage.name}: the ranks ended {MAX_FAILURES} times without completing a unit: "
            f"{reason or f'see the logs in {self.run_dir.jobs} and {stage.dir.logs}'}",
            code="no_ranks",
        )

    def ranks_of(self, stage: StageRun, role: queue.Role = "rank") -> RankProfile:
        """Return the profile of a stage's ranks, or of driver jobs."""
        return self.profile.for_stage(stage.kind, stage.resource) if role == "rank" else self.profile.driver

    def workers_in_job(self, stage: StageRun, units: Sequence[Unit]) -> int:
        """Return the number of workers with which a driver job processes a stage itself; 0 if ranks must do it."""
        cluster = self.profile
        if stage.resource == "gpu" or cluster.python is not None or cluster.container_image is not None:
            # A driver job runs outside the container and with other packages, so its output bytes may differ.
            return 0
        ranks, driver = self.ranks_of(stage), cluster.driver
        workers = driver.cores // ranks.cores
        if driver.memory_gb is not None and ranks.memory_gb is not None:
            workers = min(workers, int(driver.memory_gb / ranks.memory_gb))
        hours = sum(unit.cost for unit in units) / 3600 if stage.cost_unit == "seconds of audio" else 0.0
        fits = len(units) <= cluster.driver_units * workers and hours <= cluster.driver_hours
        return min(workers, len(units)) if fits else 0

    def num_ranks(self, stage: StageRun, units: Sequence[Unit]) -> int:
        """Return the number of ranks for these units, limited by the profile and by the amount of work."""
        return min(self.ranks_of(stage).max_ranks, self.dataset.ranks_of_use(stage, units))

    def max_parallel(self, stage: StageRun) -> int:
        """Return the number of ranks of a stage that may run at once."""
        parallel = self.ranks_of(stage).max_parallel or self.profile.max_parallel
        return min(parallel, self.profile.max_parallel_all or parallel)

    def scripts(self, stage: StageRun, num_ranks: int) -> list[str]:
        """Return the sbatch scripts of a stage's ranks, if any, and of both driver jobs, for display.

        RANKS and ADVANCE stand for job ids that are not known yet.
        """
        jobs = [
            self._submitter(stage, "advance", ["RANKS"] if num_ranks else []),
            self._submitter(stage, "second", ["ADVANCE"]),
        ]
        if num_ranks:
            ranks = self._submitter(stage, "rank")
            ranks.parameters["map_count"] = num_ranks
            jobs.insert(0, ranks)
        return [str(job._make_submission_file_text(job._submitit_command_str, "dry-run")) for job in jobs]

    def _submit(
        self, stage: StageRun, message: str, numbers: Sequence[int] = (), behind: Sequence[str] = (), *,
        is_advanced: bool = False,
    ) -> StageResult:  # fmt: skip
        """Submit ranks, a driver job after them, and a backup driver job after that.

        Args:
            message: the beginning of the message about the submission.
            numbers: the numbers of the ranks.
            behind: ids of queued jobs for which the driver job must wait too.
            is_advanced: True if a driver job and a backup driver job are in the queue already.
        """
        jobs: list[str] = []
        # A driver job may have to wait for SLURM three times within its time limit.
        patience = 0.25 * 60.0 * self.profile.driver.timeout_min
        # The jobs must not restart the run again.
        job = replace(self, restart=False, take_over=False, patience=min(patience, _MOST_PATIENCE_SECONDS))
        arguments = (stage.key, stage.token, stage.ranks.launch.exists())
        with deferred_interrupts(), queue.outside_own_job():
            try:
                if numbers:
                    tasks = [RankTask(stage, number, self.ranks_of(stage)) for number in numbers]
                    jobs += self._sbatch(tasks, stage, "rank")
                    message += f" (job {', '.join(queue.parent_ids(jobs))})"
                if not is_advanced:
                    advance = partial(replace(job, role="advance").advance, *arguments)
                    jobs += self._sbatch([advance], stage, "advance", [*behind, *jobs])
                    message += f", then driver job {jobs[-1]}"
                    second = partial(replace(job, role="second").advance, *arguments)
                    self._sbatch([second], stage, "second", jobs[-1:])
            except BaseException:
                # Cancel the ranks, because nothing would continue the run after them.
                queue.scancel(queue.parent_ids(jobs))
                raise
        return StageResult(submitted=Submitted(message, [*behind, *jobs]))

    def _sbatch(
        self, tasks: Sequence[Callable[[], Any]], stage: StageRun, role: queue.Role, behind: Sequence[str] = ()
    ) -> list[str]:
        """Submit a job or a job array, and return the ids of the jobs or tasks."""
        from submitit.core.utils import FailedJobError

        # Keep the folder private, because the pickled configuration may contain secrets from the environment.
        make_private_folder(self.run_dir.jobs)
        submitter = self._submitter(stage, role, behind)

        def submit() -> list[str]:
            # Suppress submitit's output, because the exception contains sbatch's message too.
            with redirect_stderr(StringIO()), submitter.batch():
                jobs = [submitter.submit(task) for task in tasks]
            return [job.job_id for job in jobs]

        # A job that was submitted although sbatch timed out does no harm: its tasks find nothing to do, or process the
        # same units as other tasks.
        may_pass = retry_if_exception_type(FailedJobError) & retry_if_exception_message(match=_MAY_PASS)
        try:
            return queue.retrying(self.patience, may_pass)(submit)
        except FailedJobError as error:
            said = one_line(error, None)
            if re.match(_MAY_PASS, said):
                raise queue.SlurmSilent(f"SLURM accepts no jobs at present: {said}") from error
            job = f"each rank of {stage.name}" if role == "rank" else "each driver job (stages.driver)"
            options = " ".join(self.profile.arguments(self.ranks_of(stage, role)))
            source = self.profile_file or "the defaults: give a profile of this cluster with --profile"
            raise FatalError(
                f"SLURM refused the jobs: {said}; {job} requests {options}, from {source}", code="jobs_refused"
            ) from error

    def _submitter(self, stage: StageRun, role: queue.Role, behind: Sequence[str] = ()) -> Any:
        """Return submitit's executor for an array of ranks, or for a driver job or backup that waits for other jobs."""
        import submitit

        class Submitter(submitit.SlurmExecutor):
            """Submitit's executor without its check for srun, so that scripts can be shown without SLURM."""

            @classmethod
            def affinity(cls) -> int:
                return 1

        cluster, is_rank = self.profile, role == "rank"
        ranks = self.ranks_of(stage, role)
        comment = " ".join([*filter(None, [ranks.extra.get("comment")]), job_comment(self.run_dir, role)])
        name = "-".join([self.dataset.name, stage.name.replace("/", "-"), *([] if is_rank else [role])])
        container: dict[str, Any] = {}
        if cluster.container_image is not None:
            # Relative paths in the configuration refer to this folder.
            container = {
                "image": cluster.container_image,
                "workdir": Path.cwd(),
                "mounts": ",".join(cluster.container_mounts),
            }
        in_container = [f"--container-{key}={value}" for key, value in container.items() if value]
        kind = "afternotok" if role == "second" else "afterany"
        jobs = ":".join(dict.fromkeys(job.split("_")[0] for job in behind))
        values = {
            "job_name": name,
            "time": ranks.timeout_min,
            "signal_delay_s": cluster.signal_s,
            # Do not import modules from the working directory of the job.
            "setup": ["export PYTHONSAFEPATH=1", *_checked_lines(cluster.setup)],
            "additional_parameters": {
                "requeue": True, **cluster.options(ranks), "comment": comment,
                **({"kill-on-invalid-dep": "yes"} if role == "second" else {}),
            },
            "array_parallelism": self.max_parallel(stage) if is_rank else None,
            # Since SLURM 22.05, srun no longer inherits --cpus-per-task from sbatch.
            "srun_args": [f"--cpus-per-task={ranks.cores}", *in_container] if is_rank else None,
            # A driver job submits jobs, so it runs outside of containers, with the interpreter of this process.
            "use_srun": None if is_rank else False,
            "dependency": f"{kind}:{jobs}" if behind else None,
        }  # fmt: skip
        python = cluster.python if is_rank else None
        submitter = Submitter(self.run_dir.jobs, max_num_timeout=cluster.max_requeues, python=python)
        # Submitit sets a wckey, which clusters that check wckeys would refuse.
        submitter.update_parameters(wckey=None, **{key: value for key, value in values.items() if value is not None})
        return submitter

    def advance(self, stage: str, token: str, had_ranks: bool) -> None:
        """Run the stages in a driver job or a backup driver job.

        Args:
            stage: the key of the stage that was planned before this job was submitted.
            token: the token of its plan.
            had_ranks: True if ranks of that plan have run.

        Raises:
            FatalError: the run has failed; the message names the failed units.
        """
        stages = self.dataset.make_stages()
        with logging_to(self.run_dir.advance_log, stages[-1].options.log_level):
            try:
                with ended_by_sigterm():
                    VisibilityTimeout(stages[-1].options.seconds_until_seen).wait_until(
                        lambda: self.run_dir.read_request() == self.given or self.run_dir.read_outcome() is not None,
                        "the run",
                    )
                    self.require_current()
                    wait_for_stage(stages, stage, token, had_ranks=had_ranks)
                    # Wait for the lock without a limit, because another process may hold it: the submitting process,
                    # or, if a node has started this job twice, the job's other process.
                    outcome = self._run_stages(wait_seconds=math.inf)
            except Exception as error:
                log.exception("job %s failed", os.environ.get("SLURM_JOB_ID"))
                code = error.code if isinstance(error, SharmillError) else ""
                may_pass = isinstance(error, queue.SlurmSilent)
                if code == "cancelled" or (may_pass and is_requeued(self.patience)):
                    return
                is_left_to_second = self.role == "advance" and (may_pass or not code)
                # If another process has taken over the lock, it records the outcome.
                if not (is_left_to_second or code == "locked"):
                    self._note(RunOutcome.from_error(error))
                raise
            log.info("%s", outcome.message)
        if isinstance(outcome, RunOutcome) and outcome.state == "failed":
            raise FatalError(outcome.message, code=outcome.code)

    def require_current(self) -> None:
        """Raise FatalError if the run has ended, or another run was started in its run directory."""
        if self.run_dir.read_outcome() is not None or self.run_dir.read_request() != self.given:
            raise FatalError("the run has ended, or another run was started in its run directory", code="cancelled")

    def _run_stages(self, wait_seconds: float) -> RunOutcome | Submitted:
        outcome = self.dataset.run(self, restart=self.restart, wait_seconds=wait_seconds)
        if isinstance(outcome, RunOutcome):
            self._note(outcome)
            if outcome.state == "done":
                # Write the report last, since its failure must not affect the run.
                self.dataset.show()
        return outcome

    def _note(self, end: RunOutcome) -> None:
        """Record the outcome of the run, and run the ``notify`` command of the profile, whose errors are ignored.

        Raises:
            FatalError: the run has already ended, or was cancelled.
        """
        self.require_current()
        self.run_dir.note_outcome(end)
        # Release the reservation only if no other process has taken over. Check for drivers too, because they may hold
        # no lock.
        if lock_owner(self.run_dir.path) is None and not find_workers(self.run_dir, ranks=False):
            release(self.dataset.make_stages())
        # Cancel the backup driver job, which has nothing left to do.
        with suppress(SharmillError):
            queue.scancel([job.id for job in queue.queued_jobs(self.run_dir) if job.role == "second"])
        # No notification is needed if this process is not part of a job, because its command shows how the run ended.
        if self.profile.notify is None or self.role is None:
            return
        values = {
            "SHARMILL_NAME": self.dataset.name,
            "SHARMILL_STATE": end.state,
            "SHARMILL_FINDINGS": str(end.findings),
            "SHARMILL_MESSAGE": end.message,
            "SHARMILL_RUN_DIR": str(self.run_dir.path),
        }
        try:
            subprocess.run(
                ["bash", "-c", self.profile.notify], env={**os.environ, **values},
                input=f"{end.message}\n".encode(), capture_output=True, check=True, timeout=60.0,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            said = getattr(error, "stderr", None) or b""
            log.warning("notify: %s %s", error, said.decode(errors="replace"))


def is_requeued(patience: float) -> bool:
    """Requeue this job and return True. Return False if the job has waited for half a day, or if SLURM does not answer.

    Args:
        patience: seconds that each process of this job has waited.
    """
    waited = patience * (1 + int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    if waited < _MOST_PATIENCE_SECONDS:
        with suppress(queue.SlurmSilent):
            queue.ask(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], max(patience, queue.PATIENCE_SECONDS))
            return True
    return False


def job_comment(run_dir: RunDir, role: queue.Role) -> str:
    """Return the comment that identifies jobs of a run directory, with ``new`` if the directory has no id yet."""
    return f"sharmill:{run_dir.read_id() or 'new'}:{role}"


def _checked_lines(lines: Sequence[str]) -> list[str]:
    """Return shell lines that run the setup lines of a profile, and end the script if one of them fails.

    ``set -e`` would break the scripts of conda and Lmod, in which some commands fail. Therefore only the status of each
    whole line is checked. If a line fails, the script ends with a message in the job's log.
    """
    titles = [line.strip().partition("\n")[0] for line in lines]
    return [
        f'setup_failed() {{ echo "{_SETUP_FAILED}$1: $2" >&2; exit 1; }}',
        *(
            f"eval {shlex.quote(line)} || setup_failed $? {shlex.quote(title)}"
            for line, title in zip(lines, titles, strict=True)
        ),
    ]


def wait_for_stage(stages: Sequence[StageRun], name: str, token: str, *, had_ranks: bool = True) -> None:
    """Wait until this node sees the plan of a stage, the work of its ranks, and the output of the stages before it.

    Args:
        stages: the stages of the run, in order.
        name: the key of the stage, which is planned but not finished; later stages have not started.
        token: the token of its plan.
        had_ranks: True if ranks of that plan have run and ended.
    """
    visibility = VisibilityTimeout(stages[-1].options.seconds_until_seen)
    for stage in stages:
        if stage.key == name:
            stage = stage.with_plan(token)
            wait_for_plan(stage, visibility)
            if had_ranks:
                visibility.wait_until(partial(_have_ranks_ended, stage), f"{stage.name}: the end of all units")
            return
        visibility.wait_until(partial(_is_finished, stage), f"{stage.name}: the end of the stage")


def _is_finished(stage: StageRun) -> bool:
    return stage.dir.done.exists() and has_output(stage)


def _have_ranks_ended(stage: StageRun) -> bool:
    """Return True if all ranks have ended and their notes are visible here.

    The result is also True if the stage was stopped, or if each unit is complete or given up.
    """
    if has_seen_ends(stage):
        return True
    attempts = read_attempts(stage)
    units = stage.dir.read_units()
    _, missing = find_outstanding(stage, units, read_ledger(stage.dir, units), check=units)
    return attempts.stopped is not None or all(attempts.is_given_up(unit.index, ()) for unit in missing)


def wait_for_end(run_dir: RunDir) -> RunOutcome:
    """Wait until a run has ended and its jobs have left the queue.

    Raises:
        FatalError: no jobs are left, but the run has not ended.
    """
    while True:
        jobs = queue.queued_jobs(run_dir, math.inf)
        end = run_dir.read_outcome()
        if end is not None and not jobs:
            return end
        if not jobs and not VisibilityTimeout(5.0).wait_until(
            lambda: run_dir.read_outcome() is not None, "the end of the run"
        ):
            reason = find_reason(run_dir.jobs) or f"see {run_dir.jobs}"
            raise FatalError(
                f"the jobs have ended before the work was complete: {reason}; submit the run again to continue",
                code="jobs_gone",
            )
        # Check the file of the outcome more often than the queue, because a query of the queue lists the jobs of the
        # whole cluster.
        ask_again = time.monotonic() + 10.0
        time.sleep(2.0)
        while run_dir.read_outcome() is None and time.monotonic() < ask_again:
            time.sleep(2.0)


def find_reason(jobs: Path, since: float = 0.0) -> str:
    """Return one line with the reason why the jobs ended, from the newest log with a reason; "" if there is none.

    Args:
        jobs: the folder with the logs of the jobs.
        since: a time by the clock of the file system; older logs belong to other launches.
    """
    for path, text in _read_logs(jobs, since):
        if missing := _NO_MODULE.search(text):
            return f"{describe_missing(missing[1])}; {path}"
        if said := [line.rstrip() for line in text.splitlines() if _SAYS_WHY.match(line)]:
            # Show the first error, and the message about a failed setup line, which comes after the output of that
            # line.
            named = [line for line in said[1:] if line.startswith(_SETUP_FAILED)]
            return f"{' | '.join([said[0], *named])[:300]}; {path}"
    return ""


def find_missing_module(jobs: Path, since: float, num_ranks: int) -> str:
    """Return a sentence about a missing module if, by their logs, all ranks failed to import it; "" otherwise.

    At least two ranks must have failed. If the logs name the hosts, as srun's logs do, the ranks must have run on at
    least two hosts.
    """
    lacking = {path: found for path, text in _read_logs(jobs, since) if (found := _NO_MODULE.search(text))}
    modules, hosts = ({found[group] for found in lacking.values()} for group in (1, 2))
    if len(lacking) < max(2, min(num_ranks, _MOST_LOGS)) or len(modules) > 1 or (len(hosts) < 2 and None not in hosts):
        return ""
    return f"{describe_missing(modules.pop())}; {next(iter(lacking))}"


def _read_logs(jobs: Path, since: float) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each job log written since a time, the newest first, up to a limit."""
    by_age = sorted(((path.stat().st_mtime, path) for path in jobs.glob("*_log.err")), reverse=True)
    for path in [path for written, path in by_age if written >= since][:_MOST_LOGS]:
        # Skip an unreadable log, because another log may have the reason.
        with suppress(OSError, SharmillError):
            yield path, read_stored(path).decode(errors="replace")
