"""The SLURM executor, on submitit: one task of a job array is one rank, and no process has to wait for them.

``SlurmExecutor`` runs a dataset's stages as they stand: what is complete is finalized, what is missing is submitted.
Behind each array it submits an advance job, which does the same again once the ranks have ended, and behind that a
second job, which does so only if the first fails. What is known of a run follows from its plans, its ledgers and the
queue; noted are only what it was given and how it has ended. What is too little to wait in the queue for, an advance
job does itself, as the local executor would.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tenacity import retry_if_exception_message, retry_if_exception_type

from sharmill.config.loading import check_one_line
from sharmill.engine.attempts import MAX_FAILURES, Attempts
from sharmill.engine.fence import release_run
from sharmill.engine.host import limit_cores
from sharmill.engine.late_views import wait_for_stage
from sharmill.engine.listener import Listener
from sharmill.engine.locks import lock_owner
from sharmill.engine.outcomes import Finished, StageResult, Submitted
from sharmill.engine.patience import Patience
from sharmill.engine.run import Unlocked
from sharmill.engine.run_notes import (
    End,
    Given,
    begin_run,
    end_of_error,
    note_end,
    read_end,
    read_given,
    require_not_cancelled,
)
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.state import begin_round, end_attempts, find_live, find_workers, read_round
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.executors.local import LocalExecutor
from sharmill.executors.logs import logging_to
from sharmill.executors.signals import Terminated, deferred_interrupts, ended_by_sigterm
from sharmill.executors.slurm import queue
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.setup_lines import checked_lines, find_reason, lines_that_note_failure
from sharmill.executors.slurm.task import RankTask
from sharmill.storage import make_private_folder, remove_tree

log = logging.getLogger(__name__)

# A busy controller, or a limit on jobs in the queue; anything else that sbatch says is about what was asked for.
_MAY_PASS = r"(?is).*(timed out|temporarily|unable to contact|connection|communicat|(?:Max|Grp)Submit\w*Limit)"
# A controller that is away, or limits on jobs in the queue, are waited for as long as this: by one advance job after
# the other, since each has a time limit.
_MOST_PATIENCE_SECONDS = 12 * 3600.0
# It may have to wait for three answers.
_SHARE_OF_TIME_LIMIT = 0.25
_SECONDS_TO_NOTIFY = 60.0


class Outcome(Protocol):
    """The interface of the result of a run over a dataset."""

    @property
    def stages(self) -> Sequence[tuple[Stage, StageResult]]:
        """The stages that were run, in order, and how each ended."""

    def end(self) -> End:
        """Return the end of the run, once none is submitted."""


class Dataset(Protocol):
    """The interface of a dataset with the stages that are run over it; picklable."""

    @property
    def name(self) -> str:
        """The beginning of the names of its jobs."""

    @property
    def run_dir(self) -> Path:
        """Its run directory."""

    def make_stages(self) -> list[Stage]:
        """Return the stages in the order in which they run."""

    def run(self, executor: SlurmExecutor, listener: Listener, *, restart: bool, wait_seconds: float) -> Outcome:
        """Run the stages until one fails or is submitted; wait so long for the run directory to be free."""

    def ranks_of_use(self, stage: Stage, units: Sequence[Unit]) -> int:
        """Return for how many ranks the units of a stage are enough."""

    def show(self) -> None:
        """Show to people what has been made, once all is done."""


def _one_each(stage: Stage, units: Sequence[Unit]) -> int:
    return len(units)


@dataclass(frozen=True)
class JobRequests:
    """The jobs of a run, as sbatch is told of them. All nodes share the file system of ``run_dir``.

    ``patience`` is how many seconds to go on trying where SLURM does not answer or takes no more jobs, and
    ``ranks_of_use`` is that of the dataset.
    """

    profile: ClusterProfile
    run_dir: RunDir
    name: str
    patience: float = queue.PATIENCE_SECONDS
    ranks_of_use: Callable[[Stage, Sequence[Unit]], int] = _one_each

    def __post_init__(self) -> None:
        # It is in lines of the sbatch script.
        check_one_line(str(self.run_dir.path.absolute()), "the path of the run directory")

    def ranks_of(self, stage: Stage) -> RankProfile:
        """Return the profile of a stage's ranks."""
        return self.profile.for_stage(stage.name, stage.uses_gpu)

    def workers_in_job(self, stage: Stage, units: Sequence[Unit]) -> int:
        """Return the number of workers with which an advance job does a stage itself, or 0 where ranks are to do it."""
        workers = 0 if stage.uses_gpu else self.profile.driver_workers(self.ranks_of(stage))
        hours = sum(unit.cost for unit in units) / 3600 if stage.cost_unit == "seconds of audio" else 0.0
        fits = len(units) <= self.profile.driver_units * workers and hours <= self.profile.driver_hours
        return min(workers, len(units)) if fits else 0

    def num_ranks(self, stage: Stage, units: Sequence[Unit]) -> int:
        """Return the number of ranks for these units: as many as the profile allows and are of use."""
        # So many arrays that not each could have a rank running would break max_parallel.
        most = min(self.ranks_of(stage).max_ranks, self.max_array_size * self.max_parallel(stage))
        return min(most, self.ranks_of_use(stage, units))

    def arrays(self, stage: Stage, num_ranks: int) -> list[tuple[range, int]]:
        """Return the ranks of each job array, as large as the cluster allows, and how many of them may run at once."""
        largest = self.max_array_size
        ranges = [range(start, min(start + largest, num_ranks)) for start in range(0, num_ranks, largest)]
        return [(ranks, max(1, self.max_parallel(stage) * len(ranks) // num_ranks)) for ranks in ranges]

    @cached_property
    def max_array_size(self) -> int:
        """The number of tasks that the cluster allows in one array; SLURM is asked once."""
        return queue.max_array_size(self.patience)

    def max_parallel(self, stage: Stage) -> int:
        """Return how many ranks of a stage may run at once."""
        parallel = self.ranks_of(stage).max_parallel or self.profile.max_parallel
        return min(parallel, self.profile.max_parallel_all or parallel)

    def scripts(self, stage: Stage, num_ranks: int) -> list[str]:
        """Return the sbatch scripts of a stage's ranks (of their first array), if it has any, and of both jobs behind.

        They are to be shown: numbers of jobs that are not known yet are RANKS and ADVANCE.
        """
        scripts = []
        if num_ranks:
            array, parallel = self.arrays(stage, num_ranks)[0]
            ranks = self._submitter(self._rank_parameters(stage, parallel), self.profile.python)
            ranks.parameters["map_count"] = len(array)
            scripts.append(ranks)
        behind = ["RANKS"] if num_ranks else []
        scripts += [self._submitter(self._advance_parameters(stage, "advance", behind))]
        scripts += [self._submitter(self._advance_parameters(stage, "second", ["ADVANCE"]))]
        return [str(one._make_submission_file_text(one._submitit_command_str, "dry-run")) for one in scripts]

    def submit_ranks(self, stage: Stage, parallel: int, tasks: Sequence[RankTask]) -> list[str]:
        """Submit an array of ranks, of which so many run at once, and return the numbers of its tasks."""
        return self._submit(self._rank_parameters(stage, parallel), self.profile.python, tasks)

    def submit_behind(
        self, stage: Stage, role: queue.Role, behind: Sequence[str], task: Callable[[], Any]
    ) -> list[str]:
        """Submit an advance job behind others, or a second one behind that, and return its number, alone."""
        return self._submit(self._advance_parameters(stage, role, behind), None, [task])

    def _submit(self, parameters: dict[str, Any], python: str | None, tasks: Sequence[Callable[[], Any]]) -> list[str]:
        from submitit.core.utils import FailedJobError

        # The pickled tasks have the configuration with all that the environment gave it.
        make_private_folder(self.run_dir.jobs)

        def submit() -> list[str]:
            submitter = self._submitter(parameters, python)
            # What submitit prints of sbatch's message the error has as well.
            with redirect_stderr(StringIO()), submitter.batch():
                jobs = [submitter.submit(task) for task in tasks]
            return [job.job_id for job in jobs]

        # If sbatch gives up waiting and the job is there nevertheless, it does no harm: its tasks end because they find
        # nothing to run, or do the same units as others.
        may_pass = retry_if_exception_type(FailedJobError) & retry_if_exception_message(match=_MAY_PASS)
        try:
            return queue.retrying(self.patience, may_pass)(submit)
        except FailedJobError as error:
            message = f"SLURM refuses the jobs: {' '.join(str(error).split())}"
            raise FatalError(message, code="jobs_refused") from error

    def _submitter(self, parameters: dict[str, Any], python: str | None = None) -> Any:
        """Return submitit's executor for a job."""
        import submitit

        class Submitter(submitit.SlurmExecutor):  # type: ignore[misc]
            """Submitit's class without its demand for srun, so that scripts can be shown on machines without SLURM."""

            @classmethod
            def affinity(cls) -> int:
                return 1

        submitter = Submitter(self.run_dir.jobs, max_num_timeout=self.profile.max_requeues, python=python)
        submitter.update_parameters(**parameters)
        return submitter

    def _rank_parameters(self, stage: Stage, parallel: int) -> dict[str, Any]:
        return self._parameters(stage.name, "rank", self.ranks_of(stage)) | {"array_parallelism": parallel}

    def _advance_parameters(self, stage: Stage, role: queue.Role, behind: Sequence[str]) -> dict[str, Any]:
        """Return the parameters of an advance job behind jobs, however these end, or of the second job behind that."""
        parameters = self._parameters(f"{stage.name}-{role}", role, self.profile.for_stage("driver", False))
        # It submits jobs, so it runs outside of a container, with the interpreter that runs here.
        parameters.pop("srun_args")
        parameters["use_srun"] = False
        if behind:
            kind = "afterany" if role == "advance" else "afternotok"
            parameters["dependency"] = f"{kind}:{':'.join(dict.fromkeys(job.split('_')[0] for job in behind))}"
        if role == "second":
            parameters["additional_parameters"]["kill-on-invalid-dep"] = "yes"
            parameters["setup"] = [*lines_that_note_failure(self.run_dir), *parameters["setup"]]
        return parameters

    def _parameters(self, name: str, role: queue.Role, profile: RankProfile) -> dict[str, Any]:
        """Return the parameters of a job, as submitit has them."""
        cluster = self.profile
        comment = " ".join([*filter(None, [profile.extra.get("comment")]), queue.job_comment(self.run_dir, role)])
        values: dict[str, Any] = {
            "job_name": f"{self.name}-{name.replace('/', '-')}",
            "partition": profile.partition,
            "account": profile.account or cluster.account,
            "qos": profile.qos or cluster.qos,
            "cpus_per_task": profile.cores,
            "gpus_per_node": profile.gpus or None,
            "mem": f"{round(profile.memory_gb * 1024)}M",
            "time": profile.timeout_min,
            "signal_delay_s": cluster.signal_s,
            # The folder that jobs begin in is not the first place to look for Python's own modules.
            "setup": ["export PYTHONSAFEPATH=1", *checked_lines(cluster.setup)],
            "additional_parameters": {"requeue": True, **profile.extra, "comment": comment},
            # From SLURM 22.05 on srun does not take over the cores of sbatch.
            "srun_args": [f"--cpus-per-task={profile.cores}", *_container_arguments(cluster)],
        }
        return {key: value for key, value in values.items() if value is not None}


@dataclass
class SlurmExecutor:
    """The run of one dataset on SLURM, from stage to stage; its jobs call a copy of it. ``command`` submits it again.

    Attributes:
        take_over: the user says that no jobs are left on another cluster.
        cluster, folder: the one that has the jobs, and where they were submitted; set by ``start``.
        patience: how many seconds to go on trying where SLURM does not answer or takes no more jobs.
        is_job: this process is an advance job; ``is_second``: it is the one behind an advance job that has failed.
        has_begun, submitted: what this process has done so far.
        jobs: the requests for its jobs.
    """

    waits: ClassVar[bool] = False
    dataset: Dataset
    profile: ClusterProfile
    command: str = ""
    restart: bool = False
    take_over: bool = False
    cluster: str = ""
    folder: str = ""
    patience: float = queue.PATIENCE_SECONDS
    is_job: bool = False
    is_second: bool = False
    has_begun: bool = field(default=False, init=False)
    submitted: Submitted | None = field(default=None, init=False)
    jobs: JobRequests = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = JobRequests(self.profile, self.run_dir, self.dataset.name, self.patience, self.dataset.ranks_of_use)

    @property
    def run_dir(self) -> RunDir:
        # Job scripts name it: a link may lead elsewhere by then.
        return RunDir(self.dataset.run_dir.resolve())

    @property
    def given(self) -> Given:
        """The values that the run was given, by which its jobs know whether it is still that of its run directory."""
        kinds = dict.fromkeys(stage.kind for stage in self.dataset.make_stages())
        return Given(stages=list(kinds), folder=self.folder, command=self.command, cluster=self.cluster)

    def start(self) -> End | Submitted:
        """Run the stages in this process, which plans and submits. Units that were given up before are tried again.

        Raises:
            ConfigError: the configuration is wrong, or this dataset has advance jobs in the queue.
            FatalError: a stage stopped.
        """
        queue.require_slurm()
        if "%" in str(self.run_dir.path):
            message = f"run_dir {self.run_dir.path} has a '%' in it, which SLURM and submitit replace; choose another"
            raise ConfigError(message, code="bad_config_value")
        self.cluster, self.folder = queue.cluster_name(), str(Path.cwd())
        self.has_begun, self.submitted = False, None
        try:
            return self._run_stages(wait_seconds=0.0)
        except BaseException as error:
            # Jobs that are in the queue go on.
            if self.has_begun and self.submitted is None:
                self._note_error(error)
            raise

    def find_others(self) -> list[queue.QueuedJob]:
        """Return the jobs of this run that are in the queue. This process has the run directory.

        Raises:
            ConfigError: jobs may be left that must not be.
        """
        queue.make_run_id(self.run_dir)
        others = queue.competing_jobs(self.run_dir)
        if self.restart:
            queue.require_no_jobs(self.run_dir, take_over=self.take_over)
        elif not others and not self.take_over:
            queue.require_same_cluster(self.run_dir)
        return others

    def begin(self, others: Sequence[queue.QueuedJob], *, joins: bool) -> None:
        """Begin the run beside other jobs of it; with ``joins``, ranks that are none of them are at work as well."""
        if any(job.role != "rank" for job in others):
            return  # its advance jobs go on, and this adds ranks
        begin_run(self.run_dir, self.given)
        self.has_begun = True
        # The work of ranks whose advance job is gone, or was never submitted, counts on.
        for stage in self.dataset.make_stages() if not (others or joins) else ():
            remove_tree(stage.dir.attempts)
            remove_tree(stage.dir.round)

    def run(
        self, stage: Stage, units: Sequence[Unit], listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> Finished | Submitted:  # fmt: skip
        """Submit the units, or return those that failed for good once no other is left; see ``engine.run.Executor``.

        Beside advance jobs that are in the queue already only ranks are added, and none by an advance job. Few units
        are done in the advance job. If that is killed, they wait for ranks in the next round.

        Raises:
            FatalError: a rank stopped the stage, ranks end without beginning a unit, SLURM refuses the jobs, or a user
                has cancelled the run.
        """
        require_not_cancelled(self.run_dir)
        others = queue.competing_jobs(self.run_dir, self.patience)
        message, ids = f"{queue.describe_jobs(others)} are still in the queue", [job.id for job in others]
        is_advanced = any(job.role == "advance" for job in others)
        attempts = Attempts(stage.dir.attempts)
        goes_on = stage.dir.round.exists()
        if is_advanced and (self.is_job or not goes_on):
            return Submitted(message, ids)
        if others and not is_advanced:
            return self._submit(stage, message, behind=ids)
        joins = is_advanced or bool(find_live(stage.dir, stage.lease_seconds, ranks=False))
        if goes_on and not joins:
            end_attempts(stage.dir, {unit.index for unit in units})
            attempts.look()
            if (stopped := attempts.stopped()) is not None:
                raise stopped
        left = [unit for unit in units if joins or not attempts.is_given_up(unit.index, ())]
        if not left:
            return Finished({unit.index: attempts.require_error(unit.index) for unit in units})
        workers = 0 if goes_on else self.jobs.workers_in_job(stage, left)
        if not workers:
            if goes_on and not joins:
                self._require_progress(stage, attempts)
            wanted = self.jobs.num_ranks(stage, left)
            numbers = begin_round(stage, left, wanted, goes_on=goes_on, joins=joins, waits=False)
            message = f"{stage.name}: {len(left)} units on {len(numbers)} {'more ' if joins else ''}ranks"
            return self._submit(stage, message, numbers, is_advanced=is_advanced)
        if not self.is_job or self.is_second:
            return self._submit(stage, f"{stage.name}: {len(left)} units in the advance job itself")
        log.info("%s: %d units are done here, on %d workers", stage.name, len(left), workers)
        limit_cores(self.profile.for_stage("driver", uses_gpu=False).cores)
        return LocalExecutor(workers, device="cpu").run(stage, left, listener, unlocked)

    def _submit(
        self, stage: Stage, message: str, numbers: Sequence[int] = (), behind: Sequence[str] = (), *,
        is_advanced: bool = False,
    ) -> Submitted:  # fmt: skip
        """Submit ranks, an advance job behind them or behind jobs that are in the queue, and one behind that.

        Args:
            numbers: of the ranks.
            is_advanced: there is an advance job already, and one behind it.
        """
        profile, jobs = self.jobs.ranks_of(stage), list[str]()
        limit = profile.timeout_min * 60.0 - self.profile.signal_s
        tasks = [RankTask(stage, number, profile.device, limit) for number in numbers]
        patience = _SHARE_OF_TIME_LIMIT * 60.0 * self.profile.for_stage("driver", uses_gpu=False).timeout_min
        # Only the first begins anew.
        job = replace(
            self, restart=False, take_over=False, patience=min(patience, _MOST_PATIENCE_SECONDS), is_job=True,
            is_second=False,
        )  # fmt: skip
        told: dict[str, Any] = {"stage": stage.name, "token": stage.token, "had_ranks": stage.dir.round.exists()}
        with deferred_interrupts(), queue.outside_own_job():
            try:
                for ranks, parallel in self.jobs.arrays(stage, len(tasks)):
                    jobs += self.jobs.submit_ranks(stage, parallel, tasks[ranks.start : ranks.stop])
                array = f" (job {', '.join(queue.parent_ids(jobs))})" if jobs else ""
                if is_advanced:
                    self.submitted = Submitted(f"{message}{array}", jobs)
                    return self.submitted
                jobs += self.jobs.submit_behind(stage, "advance", [*behind, *jobs], partial(job.advance, **told))
                self.jobs.submit_behind(
                    stage, "second", jobs[-1:], partial(replace(job, is_second=True).advance, **told)
                )
                self.submitted = Submitted(f"{message}{array}, then advance job {jobs[-1]}", [*behind, *jobs])
            except BaseException:
                # Without an advance job the work of ranks would come to nothing.
                queue.scancel(queue.parent_ids(jobs))
                raise
        return self.submitted

    def advance(self, stage: str = "", token: str = "", *, had_ranks: bool = True) -> None:
        """Run the stages in an advance job.

        Args:
            stage: the name of the stage that was planned before this job was submitted, "" where that is not known.
            token: the token of its plan.
            had_ranks: that ranks of that plan have ended.
        """
        make_private_folder(self.run_dir.jobs)
        job = os.environ.get("SLURM_JOB_ID", "")
        with logging_to(self.run_dir.advance_log):
            began = time.monotonic()
            try:
                with ended_by_sigterm():
                    self._wait_until_seen(stage, token, had_ranks=had_ranks)
                    # Its submission may not have left the run directory yet. One that a node starts twice, or that is
                    # requeued from a node out of reach, waits as long as its other process is at work.
                    end = self._run_stages(wait_seconds=math.inf)
            except Terminated:
                log.warning("job %s is told to end", job)
                sys.exit(128 + signal.SIGTERM)
            except Exception as error:
                log.exception("job %s ends", job)
                code = error.code if isinstance(error, SharmillError) else ""
                if code == "cancelled":
                    return
                if code == "locked":
                    # The process that has taken the run directory over notes what becomes of the run.
                    raise
                is_waiting = time.monotonic() - began >= self.patience and self._may_wait_on(code)
                if is_waiting and queue.requeue(job, max(self.patience, queue.PATIENCE_SECONDS)):
                    return
                if self.is_second or (code and not is_waiting):
                    self._note_error(error)
                raise
            log.info("%s", end.message)
        if isinstance(end, End) and end.state == "failed":
            raise FatalError(end.message, code=end.code)

    def _wait_until_seen(self, stage: str, token: str, *, had_ranks: bool) -> None:
        stages = self.dataset.make_stages()
        patience = Patience(max((one.seconds_until_seen for one in stages), default=0.0))
        patience.wait_until(self._is_current, f"the run of job {os.environ.get('SLURM_JOB_ID')}")
        self.require_current()
        if stage:
            wait_for_stage(stages, stage, token, had_ranks=had_ranks)

    def _may_wait_on(self, code: str) -> bool:
        """Return True if an error is that SLURM does not answer or takes no jobs, and that not for half a day yet."""
        waited = self.patience * (1 + int(os.environ.get("SLURM_RESTART_COUNT", "0")))
        return code in ("silent_cluster", "jobs_refused") and waited < _MOST_PATIENCE_SECONDS

    def _is_current(self) -> bool:
        return read_end(self.run_dir) is None and read_given(self.run_dir) == self.given

    def require_current(self) -> None:
        """Raise FatalError if the run has ended, or another one has begun in its place."""
        if not self._is_current():
            raise FatalError("the run has ended, or another one has begun in its place", code="cancelled")

    def _run_stages(self, wait_seconds: float) -> End | Submitted:
        outcome = self.dataset.run(self, _LogListener(), restart=self.restart, wait_seconds=wait_seconds)
        if outcome.stages and (submitted := outcome.stages[-1][1].submitted) is not None:
            return submitted
        end = outcome.end()
        self._note(end)
        if end.state == "done":
            # Last of all: the run is done, whatever becomes of this.
            self.dataset.show()
        return end

    def _note_error(self, error: BaseException) -> None:
        # On a disk that takes no note the log and the queue have to tell.
        with suppress(SharmillError, OSError):
            self._note(end_of_error(error))

    def _note(self, end: End) -> None:
        """Note the end of the run, and tell people.

        Raises:
            FatalError: a user has cancelled it.
        """
        self.require_current()
        note_end(self.run_dir, end)
        # Another process may have taken over meanwhile; its ranks hold no lock.
        if lock_owner(self.run_dir.path) is None and not find_workers(self.run_dir, ranks=False):
            release_run(self.run_dir)
        # The job behind one that has noted the end has nothing to do.
        with suppress(SharmillError):
            queue.scancel([job.id for job in queue.queued_jobs(self.run_dir) if job.role == "second"])
        self._notify(end)

    def _notify(self, end: End) -> None:
        """Run the command of the profile; what becomes of it changes nothing."""
        # Who submits sees the end of what ends at once.
        if self.profile.notify is None or "SLURM_JOB_ID" not in os.environ:
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
                input=f"{end.message}\n".encode(), capture_output=True, check=True, timeout=_SECONDS_TO_NOTIFY,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            said = getattr(error, "stderr", None) or b""
            log.warning("notify: %s %s", error, said.decode(errors="replace"))

    def _require_progress(self, stage: Stage, attempts: Attempts) -> None:
        """Raise FatalError where ranks end again and again without doing anything: nothing would ever end that."""
        before = read_round(stage.dir).begun
        if len(before) < MAX_FAILURES or set(before[-MAX_FAILURES:]) != {attempts.num_begun}:
            return
        if attempts.slots_out():
            raise attempts.all_out_error(stage.name, stage.dir.logs)
        reason = (
            find_reason(self.run_dir.jobs, stage.dir.round.stat().st_mtime)
            or f"see the logs in {self.run_dir.jobs} and {stage.dir.logs}"
        )
        message = f"{stage.name}: the ranks ended {MAX_FAILURES} times without doing a unit: {reason}"
        raise FatalError(message, code="no_ranks")


class _LogListener(Listener):
    """Notes in the log what happens."""

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        log.info("%s: %d of %d units are done", stage.name, len(done), len(units))

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        if result.submitted is None:
            log.info("%s: %s", stage.name, "done" if result.ok else f"{len(result.failures)} units failed")


def _container_arguments(cluster: ClusterProfile) -> list[str]:
    if cluster.container_image is None:
        return []
    mounts = [f"--container-mounts={','.join(cluster.container_mounts)}"] if cluster.container_mounts else []
    # Relative paths of the configuration are relative to this folder.
    return [f"--container-image={cluster.container_image}", *mounts, f"--container-workdir={Path.cwd()}"]
