"""The SLURM executor, on submitit: one task of a job array is one rank, and no process has to wait for them.

``SlurmExecutor`` runs a dataset's stages as they stand: what is complete is finalized, what is missing is submitted.
Behind each array it submits an advance job, which does the same again once the ranks have ended, and behind that a
second job, which does so only if the first fails. What is known of a run follows from its plans, its ledgers and the
queue; noted are only what it was given and how it has ended. What is too little to wait in the queue for, an advance
job does itself, as the local executor would.
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

# A busy controller, or a limit on jobs in the queue; anything else that sbatch says is about what was asked for.
_MAY_PASS = r"(?is).*(timed out|temporarily|unable to contact|connection|communicat|(?:Max|Grp)Submit\w*Limit)"
# A controller that is away, or limits on jobs in the queue, are waited for as long as this: by one advance job after
# the other, since each has a time limit.
_MOST_PATIENCE_SECONDS = 12 * 3600.0
_MOST_LOGS = 50
_SETUP_FAILED = "sharmill: the setup line failed with status "
# At the end of a log, of a traceback or of what ``python -m`` says; behind it srun may name the node.
_NO_MODULE = re.compile(
    r"^(?:.*\()?ModuleNotFoundError: No module named '([\w.]+)'\)?\s*"
    r"(?:^srun: (?:error: ([^:\s]+): task \d+: Exited|(?!error)).*\s*)*\Z",
    re.MULTILINE,
)
_SAYS_WHY = re.compile(
    r"(?!\s|submitit ).*(error|exception|not ?found|no such|denied|cannot|could not|unable|fail|killed)", re.IGNORECASE
)


class Dataset(Protocol):
    """The interface of a dataset with the stages that are run over it; picklable."""

    @property
    def name(self) -> str:
        """The beginning of the names of its jobs."""

    @property
    def run_dir(self) -> Path:
        """Its run directory."""

    def make_stages(self) -> list[StageRun]:
        """Return the stages in the order in which they run."""

    def run(self, executor: "SlurmExecutor", *, restart: bool, wait_seconds: float) -> RunOutcome | Submitted:
        """Run the stages until one fails or is submitted; wait so long for the run directory to be free."""

    def ranks_of_use(self, stage: StageRun, units: Sequence[Unit]) -> int:
        """Return for how many ranks the units of a stage are enough."""

    def show(self) -> None:
        """Show to people what has been made, once all is done."""


@dataclass
class RankTask:
    """A rank of a stage: a task of an array, which is a supervisor of one rank; picklable, and callable on the node.

    Told to leave (preemption, time limit), its rank gives the unit in flight back, and the task is requeued, to go on.
    """

    stage: StageRun
    number: int
    ranks: RankProfile

    def __call__(self) -> None:
        """Do units until the stage has ended; that others have finished it, or begun it anew, is no failure."""
        stage, device = self.stage, Device.given(self.ranks.device)
        # A cluster need not bind tasks to their cores.
        limit_cores(self.ranks.cores)
        try:
            with ended_by_sigterm():
                watcher = supervise_rank(stage, device, self.number, job_seconds=60.0 * self.ranks.timeout_min)
        except (FatalError, FileNotFoundError):
            if is_current(stage):
                raise
            log.warning("rank %d is overtaken: %s", self.number, superseded(stage))
            return
        # One for all: a scheduler is asked no more often the more ranks there are.
        leader, array = watcher.leader, os.environ.get("SLURM_ARRAY_JOB_ID")
        if leader is not None and watcher.state.ended and array is not None:
            self._end_others(array, leader)

    def _end_others(self, array: str, leader: Leader) -> None:
        """Cancel the tasks that find nothing left, and those whose nodes stand still: an advance job waits for all."""
        first = self.number - int(os.environ["SLURM_ARRAY_TASK_ID"])
        silent = [number - first for number in leader.silent_ranks() if number >= first]
        queue.scancel([array], "--state=PENDING")
        queue.scancel([f"{array}_{task}" for task in silent])

    def checkpoint(self) -> Any:
        """Return what is run after the requeue; submitit calls this when the task has to leave, and ends it then."""
        from submitit.helpers import DelayedSubmission

        log.warning("rank %d is told to leave", self.number)
        # SLURM may send it at once where it preempts, or where the time is over: the requeue comes first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return DelayedSubmission(self)


@dataclass
class SlurmExecutor(Executor):
    """The run of one dataset on SLURM, from stage to stage; its jobs call a copy of it. ``command`` submits it again.

    All nodes share the file system of the run directory.

    Attributes:
        profile_file: of which the profile was read, "" if it has the defaults.
        take_over: the user says that no jobs are left on another cluster.
        patience: how many seconds to go on trying where SLURM does not answer or takes no more jobs.
        role: of the job that this process is, None where it is none.
        given: what the run was given, by which its jobs know whether it is still that of its run directory.
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
        # A link may lead elsewhere by the time that a job begins.
        path = self.dataset.run_dir.resolve()
        check_one_line(str(path), "the path of the run directory")
        if "%" in str(path):
            raise ConfigError(
                f"run_dir {path} has a '%' in it, which SLURM and submitit replace; choose another",
                code="bad_config_value",
            )
        self.run_dir = RunDir(path)

    def start(self) -> RunOutcome | Submitted:
        """Run the stages in this process, which plans and submits. Units that were given up before are tried again.

        Raises:
            ConfigError: the configuration is wrong, or this dataset has advance jobs in the queue.
            FatalError: a stage stopped.
        """
        if not (cluster := queue.setting("ClusterName")):
            raise ConfigError("there is no SLURM cluster here", code="no_cluster")
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

    def begin(self, run_dir: RunDir, given: RunRequest, jobs: Sequence[queue.QueuedJob], *, joins: bool) -> None:
        if any(job.role != "rank" for job in jobs):
            return  # its advance jobs go on, and this adds ranks
        run_dir.begin(self.given)
        # The work of ranks whose advance job is gone, or was never submitted, counts on.
        for stage in self.dataset.make_stages() if not (jobs or joins) else ():
            remove(stage.ranks.launch)

    def run(
        self, stage: StageRun, units: Sequence[Unit], listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> StageResult:  # fmt: skip
        """Submit the units, or return those that failed for good once no other is left; see ``Executor``.

        Beside advance jobs that are in the queue already only ranks are added, and none by an advance job. Few units
        are done in the advance job. If that is killed, they wait for ranks in the next round.

        Raises:
            FatalError: a rank stopped the stage, ranks end without beginning a unit, SLURM refuses the jobs, or a user
                has cancelled the run.
        """
        self.run_dir.require_not_cancelled()
        others = self._competing_jobs()
        message, ids = f"{queue.describe_jobs(others)} are still in the queue", [job.id for job in others]
        is_advanced = any(job.role == "advance" for job in others)
        goes_on = stage.ranks.launch.exists()
        if is_advanced and (self.role is not None or not goes_on):
            return StageResult(submitted=Submitted(message, ids))
        if others and not is_advanced:
            return self._submit(stage, message, behind=ids)
        joins = is_advanced or bool(find_live(stage.dir, stage.options.lease_seconds, ranks=False))
        left = list(units)
        if not joins:
            attempts = end_attempts(stage, {unit.index for unit in units})
            if attempts.stopped is not None:
                raise attempts.stopped
            left = [unit for unit in units if not attempts.is_given_up(unit.index, ())]
            if not left:
                return StageResult(failures={unit.index: attempts.error(unit.index) for unit in units})
            if goes_on:
                self._require_progress(stage, attempts)
        workers = 0 if goes_on else self.workers_in_job(stage, left)
        if not workers:
            numbers = begin_launch(
                stage,
                left,
                self.num_ranks(stage, left),
                join_seconds=stage.options.lease_seconds,
                goes_on=goes_on,
                joins=joins,
            )
            ranks = counted(len(numbers), "more rank" if joins else "rank")
            message = f"{stage.name}: {counted(len(left), 'unit')} on {ranks}"
            return self._submit(stage, message, numbers, is_advanced=is_advanced)
        if self.role != "advance":
            return self._submit(stage, f"{stage.name}: {counted(len(left), 'unit')}, which need no ranks")
        log.info("%s: %d units are done here, on %d workers", stage.name, len(left), workers)
        limit_cores(self.profile.driver.cores)
        return LocalExecutor(workers, device="cpu").run(stage, left, listener, unlocked)

    def _competing_jobs(self) -> list[queue.QueuedJob]:
        """Return the jobs beside which this process must submit no ranks.

        For an advance job these are ranks and later advance jobs: those before it have only not quite ended.
        """
        found = queue.queued_jobs(self.run_dir, self.patience, on_any_cluster=True)
        if self.role is None:
            return found
        own = int(os.environ["SLURM_JOB_ID"])
        return [job for job in found if job.role == "rank" or (job.role == "advance" and int(job.id) > own)]

    def _require_progress(self, stage: StageRun, attempts: Attempts) -> None:
        """Raise FatalError where ranks end again and again without doing anything: nothing would ever end that."""
        launch = load_record(stage.ranks.launch, Launch)
        if (error := attempts.error_of_all(len(launch.bins))) is not None:
            raise error
        begun = stage.ranks.launch.stat().st_mtime
        # Ranks that cannot even begin note nothing.
        lacking = find_missing_module(self.run_dir.jobs, begun, len(launch.bins)) if not attempts.num_ended else ""
        if lacking:
            raise FatalError(f"{stage.name}: no rank can begin: {lacking}", code="missing_package")
        before = launch.begun
        if len(before) < MAX_FAILURES or set(before[-MAX_FAILURES:]) != {attempts.num_ended}:
            return
        if attempts.excluded_slots():
            raise attempts.all_excluded_error(stage.name, stage.dir.logs)
        reason = find_reason(self.run_dir.jobs, begun)
        raise FatalError(
            f"{stage.name}: the ranks ended {MAX_FAILURES} times without doing a unit: "
            f"{reason or f'see the logs in {self.run_dir.jobs} and {stage.dir.logs}'}",
            code="no_ranks",
        )

    def ranks_of(self, stage: StageRun, role: queue.Role = "rank") -> RankProfile:
        """Return the profile of a stage's ranks, or of the jobs behind them."""
        return self.profile.for_stage(stage.kind, stage.resource) if role == "rank" else self.profile.driver

    def workers_in_job(self, stage: StageRun, units: Sequence[Unit]) -> int:
        """Return the number of workers with which an advance job does a stage itself, or 0 where ranks are to do it."""
        cluster = self.profile
        if stage.resource == "gpu" or cluster.python is not None or cluster.container_image is not None:
            # An advance job runs outside of containers: it has other packages, and so perhaps other bytes.
            return 0
        ranks, driver = self.ranks_of(stage), cluster.driver
        workers = driver.cores // ranks.cores
        if driver.memory_gb is not None and ranks.memory_gb is not None:
            # Else it goes by the cores.
            workers = min(workers, int(driver.memory_gb / ranks.memory_gb))
        hours = sum(unit.cost for unit in units) / 3600 if stage.cost_unit == "seconds of audio" else 0.0
        fits = len(units) <= cluster.driver_units * workers and hours <= cluster.driver_hours
        return min(workers, len(units)) if fits else 0

    def num_ranks(self, stage: StageRun, units: Sequence[Unit]) -> int:
        """Return the number of ranks for these units: as many as the profile allows and are of use."""
        return min(self.ranks_of(stage).max_ranks, self.dataset.ranks_of_use(stage, units))

    def max_parallel(self, stage: StageRun) -> int:
        """Return how many ranks of a stage may run at once."""
        parallel = self.ranks_of(stage).max_parallel or self.profile.max_parallel
        return min(parallel, self.profile.max_parallel_all or parallel)

    def scripts(self, stage: StageRun, num_ranks: int) -> list[str]:
        """Return the sbatch scripts of a stage's ranks, if it has any, and of both jobs behind, to be shown.

        Numbers of jobs that are not known yet are RANKS and ADVANCE.
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
        """Submit ranks, an advance job behind them or behind jobs that are in the queue, and one behind that.

        Args:
            numbers: of the ranks.
            is_advanced: there is an advance job already, and one behind it.
        """
        jobs: list[str] = []
        # It may have to wait for three answers.
        patience = 0.25 * 60.0 * self.profile.driver.timeout_min
        # Only the first begins anew.
        job = replace(self, restart=False, take_over=False, patience=min(patience, _MOST_PATIENCE_SECONDS))
        told = (stage.key, stage.token, stage.ranks.launch.exists())
        with deferred_interrupts(), queue.outside_own_job():
            try:
                if numbers:
                    tasks = [RankTask(stage, number, self.ranks_of(stage)) for number in numbers]
                    jobs += self._sbatch(tasks, stage, "rank")
                    message += f" (job {', '.join(queue.parent_ids(jobs))})"
                if not is_advanced:
                    advance = partial(replace(job, role="advance").advance, *told)
                    jobs += self._sbatch([advance], stage, "advance", [*behind, *jobs])
                    message += f", then advance job {jobs[-1]}"
                    second = partial(replace(job, role="second").advance, *told)
                    self._sbatch([second], stage, "second", jobs[-1:])
            except BaseException:
                # The work of ranks would be lost if no advance job followed.
                queue.scancel(queue.parent_ids(jobs))
                raise
        return StageResult(submitted=Submitted(message, [*behind, *jobs]))

    def _sbatch(
        self, tasks: Sequence[Callable[[], Any]], stage: StageRun, role: queue.Role, behind: Sequence[str] = ()
    ) -> list[str]:
        """Submit a job, or an array, and return its number, or those of its tasks."""
        from submitit.core.utils import FailedJobError

        # The pickled tasks have the configuration with all that the environment gave it.
        make_private_folder(self.run_dir.jobs)
        submitter = self._submitter(stage, role, behind)

        def submit() -> list[str]:
            # The error has all that submitit prints of sbatch's message.
            with redirect_stderr(StringIO()), submitter.batch():
                jobs = [submitter.submit(task) for task in tasks]
            return [job.job_id for job in jobs]

        # If sbatch gives up waiting and the job is there nevertheless, it does no harm: its tasks end because they find
        # nothing to run, or do the same units as others.
        may_pass = retry_if_exception_type(FailedJobError) & retry_if_exception_message(match=_MAY_PASS)
        try:
            return queue.retrying(self.patience, may_pass)(submit)
        except FailedJobError as error:
            said = one_line(error, None)
            if re.match(_MAY_PASS, said):
                raise queue.SlurmSilent(f"SLURM takes no jobs at present: {said}") from error
            asks = f"each rank of {stage.name} asks" if role == "rank" else "each advance job (stages.driver) asks"
            asked = " ".join(self.profile.arguments(self.ranks_of(stage, role)))
            source = self.profile_file or "the defaults: give a profile of this cluster by --profile"
            raise FatalError(
                f"SLURM refuses the jobs: {said}; {asks} for {asked}, from {source}", code="jobs_refused"
            ) from error

    def _submitter(self, stage: StageRun, role: queue.Role, behind: Sequence[str] = ()) -> Any:
        """Return submitit's executor for an array of ranks, or for an advance job behind others."""
        import submitit

        class Submitter(submitit.SlurmExecutor):
            """Submitit's class without its demand for srun, so that scripts can be shown on machines without SLURM."""

            @classmethod
            def affinity(cls) -> int:
                return 1

        cluster, is_rank = self.profile, role == "rank"
        ranks = self.ranks_of(stage, role)
        comment = " ".join([*filter(None, [ranks.extra.get("comment")]), job_comment(self.run_dir, role)])
        name = "-".join([self.dataset.name, stage.name.replace("/", "-"), *([] if is_rank else [role])])
        container: dict[str, Any] = {}
        if cluster.container_image is not None:
            # Relative paths of the configuration are relative to this folder.
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
            # The folder that jobs begin in is not the first place to look for Python's own modules.
            "setup": ["export PYTHONSAFEPATH=1", *_checked_lines(cluster.setup)],
            "additional_parameters": {
                "requeue": True, **cluster.options(ranks), "comment": comment,
                **({"kill-on-invalid-dep": "yes"} if role == "second" else {}),
            },
            "array_parallelism": self.max_parallel(stage) if is_rank else None,
            # From SLURM 22.05 on srun does not take over the cores of sbatch.
            "srun_args": [f"--cpus-per-task={ranks.cores}", *in_container] if is_rank else None,
            # An advance job submits jobs, so it runs outside of a container, with the interpreter that runs here.
            "use_srun": None if is_rank else False,
            "dependency": f"{kind}:{jobs}" if behind else None,
        }  # fmt: skip
        python = cluster.python if is_rank else None
        submitter = Submitter(self.run_dir.jobs, max_num_timeout=cluster.max_requeues, python=python)
        # Submitit has a wckey of its own, which a cluster that checks them refuses.
        submitter.update_parameters(wckey=None, **{key: value for key, value in values.items() if value is not None})
        return submitter

    def advance(self, stage: str, token: str, had_ranks: bool) -> None:
        """Run the stages in an advance job.

        Args:
            stage: the name of the stage that was planned before this job was submitted.
            token: the token of its plan.
            had_ranks: that ranks of that plan have ended.

        Raises:
            FatalError: the run has failed; the message names its units.
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
                    # Its submission may not have left the run directory yet. One that a node starts twice, or that is
                    # requeued from a node out of reach, waits as long as its other process is at work.
                    outcome = self._run_stages(wait_seconds=math.inf)
            except Exception as error:
                log.exception("job %s ends", os.environ.get("SLURM_JOB_ID"))
                code = error.code if isinstance(error, SharmillError) else ""
                may_pass = isinstance(error, queue.SlurmSilent)
                if code == "cancelled" or (may_pass and is_requeued(self.patience)):
                    return
                is_left_to_second = self.role == "advance" and (may_pass or not code)
                # The process that has taken the run directory over notes what becomes of the run.
                if not (is_left_to_second or code == "locked"):
                    self._note(RunOutcome.from_error(error))
                raise
            log.info("%s", outcome.message)
        if isinstance(outcome, RunOutcome) and outcome.state == "failed":
            raise FatalError(outcome.message, code=outcome.code)

    def require_current(self) -> None:
        """Raise FatalError if the run has ended, or another one has begun in its place."""
        if self.run_dir.read_outcome() is not None or self.run_dir.read_request() != self.given:
            raise FatalError("the run has ended, or another one has begun in its place", code="cancelled")

    def _run_stages(self, wait_seconds: float) -> RunOutcome | Submitted:
        outcome = self.dataset.run(self, restart=self.restart, wait_seconds=wait_seconds)
        if isinstance(outcome, RunOutcome):
            self._note(outcome)
            if outcome.state == "done":
                # Last of all: the run is done, whatever becomes of this.
                self.dataset.show()
        return outcome

    def _note(self, end: RunOutcome) -> None:
        """Note the end of the run, and run the command of the profile; what becomes of that changes nothing.

        Raises:
            FatalError: a user has cancelled it.
        """
        self.require_current()
        self.run_dir.note_outcome(end)
        # Another process may have taken over meanwhile; its ranks hold no lock.
        if lock_owner(self.run_dir.path) is None and not find_workers(self.run_dir, ranks=False):
            release(self.dataset.make_stages())
        # The job behind one that has noted the end has nothing to do.
        with suppress(SharmillError):
            queue.scancel([job.id for job in queue.queued_jobs(self.run_dir) if job.role == "second"])
        # A command that submits shows by itself how a run ended.
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
    """Have this job wait on in the queue; return False where that has gone on for half a day, or SLURM does not.

    Args:
        patience: how many seconds it has waited by itself.
    """
    waited = patience * (1 + int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    if waited < _MOST_PATIENCE_SECONDS:
        with suppress(queue.SlurmSilent):
            queue.ask(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], max(patience, queue.PATIENCE_SECONDS))
            return True
    return False


def job_comment(run_dir: RunDir, role: queue.Role) -> str:
    """Return the comment by which the jobs of a run directory are found; without an id, scripts are only shown."""
    return f"sharmill:{run_dir.read_id() or 'new'}:{role}"


def _checked_lines(lines: Sequence[str]) -> list[str]:
    """Return shell lines that run the setup lines of a profile, and end the script where one of them fails.

    ``set -e`` would break the scripts of conda and Lmod, which have commands that fail. So the status of each line as a
    whole is looked at, and where it failed the script ends with one line in the job's log.
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
    """Wait until this node sees the plan of a stage, what its ranks have done, and what the stages before left.

    Args:
        stages: those of the run, in order.
        name: that of the stage, which is planned and not finished; of those behind it nothing is there.
        token: the token of its plan.
        had_ranks: that ranks of that plan have run and ended.
    """
    patience = VisibilityTimeout(stages[-1].options.seconds_until_seen)
    for stage in stages:
        if stage.key == name:
            stage = stage.with_plan(token)
            wait_for_plan(stage, patience)
            if had_ranks:
                patience.wait_until(partial(_have_ranks_ended, stage), f"{stage.name}: the end of all units")
            return
        patience.wait_until(partial(_is_finished, stage), f"{stage.name}: its end")


def _is_finished(stage: StageRun) -> bool:
    return stage.dir.done.exists() and has_output(stage)


def _have_ranks_ended(stage: StageRun) -> bool:
    """Return True if nothing more is to be seen of ranks: all have told their end, or each unit is done or given up."""
    if has_seen_ends(stage):
        return True
    attempts = read_attempts(stage)
    units = stage.dir.read_units()
    _, missing = find_outstanding(stage, units, read_ledger(stage.dir, units), check=units)
    return attempts.stopped is not None or all(attempts.is_given_up(unit.index, ()) for unit in missing)


def wait_for_end(run_dir: RunDir) -> RunOutcome:
    """Wait until a run has ended, and its jobs have left the queue.

    Raises:
        FatalError: its jobs are gone and it has not come to an end.
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
                f"the jobs have ended before the work did: {reason}; submit again to go on", code="jobs_gone"
            )
        # A queue lists the jobs of a whole cluster; the end of a run is a file.
        ask_again = time.monotonic() + 10.0
        time.sleep(2.0)
        while run_dir.read_outcome() is None and time.monotonic() < ask_again:
            time.sleep(2.0)


def find_reason(jobs: Path, since: float = 0.0) -> str:
    """Return what the newest log of a job in a folder says of its end, in one line; "" where none says anything.

    Logs of before ``since``, by the clock of the file system, are of other rounds and stages.
    """
    for path, text in _read_logs(jobs, since):
        if missing := _NO_MODULE.search(text):
            return f"{describe_missing(missing[1])}; {path}"
        if said := [line.rstrip() for line in text.splitlines() if _SAYS_WHY.match(line)]:
            # The output of a setup line comes before the sentence about its end.
            named = [line for line in said[1:] if line.startswith(_SETUP_FAILED)]
            return f"{' | '.join([said[0], *named])[:300]}; {path}"
    return ""


def find_missing_module(jobs: Path, since: float, num_ranks: int) -> str:
    """Return a sentence about a module for lack of which, by their logs, all of several ranks ended; else "".

    If the logs name hosts, as those of srun do, ranks on a single host tell nothing.
    """
    lacking = {path: found for path, text in _read_logs(jobs, since) if (found := _NO_MODULE.search(text))}
    modules, hosts = ({found[group] for found in lacking.values()} for group in (1, 2))
    if len(lacking) < max(2, min(num_ranks, _MOST_LOGS)) or len(modules) > 1 or (len(hosts) < 2 and None not in hosts):
        return ""
    return f"{describe_missing(modules.pop())}; {next(iter(lacking))}"


def _read_logs(jobs: Path, since: float) -> Iterator[tuple[Path, str]]:
    """Yield the logs of jobs that were written since a time, some of the newest, those first."""
    by_age = sorted(((path.stat().st_mtime, path) for path in jobs.glob("*_log.err")), reverse=True)
    for path in [path for written, path in by_age if written >= since][:_MOST_LOGS]:
        # The log of another job may say it.
        with suppress(OSError, SharmillError):
            yield path, read_stored(path).decode(errors="replace")
