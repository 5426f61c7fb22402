"""Jobs that stand in SLURM's queue before their work is known, so that they have waited by then (``submit_ahead``).

Behind the driver job of a stage stand the ranks of the next one, behind them their driver job with its watcher job, and
so on to the last stage. The driver job that plans a stage gives work to the jobs that wait for it, in a file beside
their scripts. A job that begins without work ends soon, so one that nobody could cancel does no harm.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharmill.engine.patience import Patience
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.errors import SharmillError
from sharmill.executors.signals import deferred_interrupts
from sharmill.executors.slurm import scheduler
from sharmill.executors.slurm.chain_state import read_state, require_not_withdrawn
from sharmill.executors.slurm.job_requests import JobRequests, cancel_from_behind, cancelled_on_error
from sharmill.executors.slurm.queue import (
    QueuedJob,
    jobs_ahead,
    outside_own_job,
    parent_ids,
    scancel,
    set_dependency,
)
from sharmill.executors.slurm.task import RankTask
from sharmill.ports import process
from sharmill.storage import make_private_folder, open_stored, write_atomic

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

log = logging.getLogger(__name__)

# A node may see even the chain's state late.
_SECONDS_UNTIL_STATE_SEEN = 5.0


@dataclass
class WaitingJob:
    """A job, or a task of an array, that finds its work when it begins: picklable, and callable on the node.

    ``index`` is that of the task; ``status`` is the exit status of one that finds none.
    """

    run_dir: RunDir
    index: int = 0
    seconds_until_seen: float = 0.0
    status: int = 0

    def __post_init__(self) -> None:
        self._work: Any = None

    def __call__(self) -> Any:
        """Do the work that was given to this job, and return what it returns."""
        number = process.environ.get("SLURM_ARRAY_JOB_ID") or process.environ["SLURM_JOB_ID"]
        path = self.run_dir.job_work(int(number))
        patience = Patience(self.seconds_until_seen)
        if not (self._may_have_work(number, path) and patience.wait_until(path.exists, str(path))):
            log.warning("job %s ends, since it was submitted ahead and has not been given any work", number)
            sys.exit(self.status)
        with open_stored(path) as stream:
            works = pickle.load(stream)
        if self.index >= len(works):
            log.warning("task %d of job %s ends, since there are only %d ranks", self.index, number, len(works))
            return None
        self._work = works[self.index]
        return self._work()

    def _may_have_work(self, number: str, path: Path) -> bool:
        """Return False if a job need not wait for its work to be seen."""
        return True


@dataclass
class WaitingRank(WaitingJob):
    """A rank that finds its work when it begins.

    It may hold a GPU, so it waits for work only where the chain's state says that it was given some.
    """

    def _may_have_work(self, number: str, path: Path) -> bool:
        def is_given() -> bool:
            state = read_state(self.run_dir)
            return path.exists() or (state is not None and number in parent_ids(state.jobs))

        seconds = min(_SECONDS_UNTIL_STATE_SEEN, self.seconds_until_seen)
        return Patience(seconds).wait_until(is_given, f"job {number} in {self.run_dir.chain}")

    def checkpoint(self) -> DelayedSubmission:
        """Return what is run after the requeue; submitit calls this in the rank's process when it has to leave."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(dataclasses.replace(self)) if self._work is None else self._work.checkpoint()


@dataclass(frozen=True)
class StageJobs:
    """The jobs that wait for a stage: an array, whose ``ranks`` are its tasks, a driver job and its watcher job."""

    ranks: Sequence[QueuedJob]
    driver: QueuedJob
    watcher: QueuedJob

    @classmethod
    def find(cls, waiting: Sequence[QueuedJob], stage: str) -> StageJobs | None:
        """Return those of a stage, or None where they are not all there."""
        by_role: dict[str, list[QueuedJob]] = {"rank": [], "driver": [], "watcher": []}
        for job in waiting:
            if job.ahead == stage and job.state == "PENDING":
                by_role[job.role].append(job)
        ranks = sorted(by_role["rank"], key=lambda job: job.task)
        if any(len({job.number for job in jobs}) != 1 for jobs in by_role.values()):
            return None
        if [job.task for job in ranks] != list(range(len(ranks))):
            return None
        return cls(ranks, by_role["driver"][0], by_role["watcher"][0])


def give_to_waiting(
    jobs: JobRequests, stage: Stage, later: Sequence[Stage], ranks: Sequence[RankTask]
) -> tuple[list[str], str] | None:
    """Give the work of a stage to the jobs that wait for it; return the numbers of its ranks and of its driver job.

    The caller is the driver job that these jobs wait for; ``later`` are the stages behind this one. Where the jobs are
    not all there, or too few, nothing is done, and None is returned.
    """
    waiting = jobs_ahead(jobs.run_dir, jobs.patience)
    found = StageJobs.find(waiting, stage.name)
    if found is None or len(found.ranks) < len(ranks):
        return None
    kept = {stage.name, *(other.name for other in later)}
    skipped = [job.id for job in waiting if job.ahead not in kept]
    array = found.ranks[0].number
    with deferred_interrupts(), cancelled_on_error([job.id for job in waiting]):
        if skipped:
            # This driver job has done the stage before by itself, and the jobs of that one are not needed.
            set_dependency(str(array), f"afterok:{process.environ['SLURM_JOB_ID']}", jobs.patience)
            cancel_from_behind(skipped)
        scancel([job.id for job in found.ranks[len(ranks) :]])
        told = jobs.told(stage, had_ranks=True)
        _give_work(jobs.run_dir, array, ranks)
        _give_work(jobs.run_dir, found.watcher.number, [partial(jobs.watcher_job, **told)])
        _give_work(jobs.run_dir, found.driver.number, [partial(jobs.driver_job, **told)])
    return [job.id for job in found.ranks[: len(ranks)]], found.driver.id


def _give_work(run_dir: RunDir, number: int, tasks: Sequence[Callable[[], Any]]) -> None:
    import cloudpickle

    # As submitit's own files of jobs, it has the configuration with all that the environment gave it.
    make_private_folder(run_dir.jobs)
    write_atomic(run_dir.job_work(number), cloudpickle.dumps(list(tasks)))


def submit_ahead(jobs: JobRequests, later: Sequence[Stage], driver_job: str) -> None:
    """Submit the jobs of stages, without work, behind the driver job of the one before.

    SLURM may limit jobs in the queue, and a disk may be full: then those of the last stages are left out.
    """
    for stage in later:
        submitted: list[str] = []
        seen = stage.seconds_until_seen
        try:
            require_not_withdrawn(jobs.run_dir)
            with deferred_interrupts(), outside_own_job(), cancelled_on_error(submitted):
                ranks, driver, watcher = _parameters(jobs, stage, driver_job)
                tasks = [WaitingRank(jobs.run_dir, rank, seen) for rank in _waiting_ranks(jobs, stage)]
                submitted += jobs.try_to_submit(ranks, jobs.profile.python, tasks)
                driver["dependency"] = f"afterany:{parent_ids(submitted)[0]}"
                # With another status than 0 the jobs of the stage behind go as well.
                submitted += jobs.try_to_submit(driver, None, [WaitingJob(jobs.run_dir, 0, seen, status=1)])
                driver_job = submitted[-1]
                watcher["dependency"] = f"afternotok:{driver_job}"
                submitted += jobs.try_to_submit(watcher, None, [WaitingJob(jobs.run_dir, 0, seen)])
                for number in parent_ids(submitted):
                    # Numbers of jobs may begin anew.
                    jobs.run_dir.job_work(int(number)).unlink(missing_ok=True)
        except (scheduler.failed_job_error(), SharmillError, OSError) as error:
            log.warning("jobs are not submitted ahead from %s on: %s", stage.name, " ".join(str(error).split()))
            break


def ahead_scripts(jobs: JobRequests, later: Sequence[Stage]) -> list[str]:
    """Return the scripts of the jobs that are submitted ahead for stages, to be shown."""
    scripts = []
    for stage in later:
        ranks, driver, watcher = _parameters(jobs, stage, "DRIVER")
        num_tasks = len(_waiting_ranks(jobs, stage))
        scripts.append(scheduler.script(jobs.request(ranks, jobs.profile.python), num_tasks=num_tasks))
        scripts += [scheduler.script(jobs.request(parameters, None)) for parameters in (driver, watcher)]
    return scripts


def _parameters(jobs: JobRequests, stage: Stage, driver_job: str) -> tuple[dict[str, Any], ...]:
    """Return the parameters of the ranks that wait for a driver job, of their driver job, and of its watcher job."""
    ranks = jobs.parameters(stage.name, "rank", jobs.ranks_of(stage), ahead=stage.name)
    # Where the driver job fails, its watcher job submits others.
    ranks |= {"array_parallelism": jobs.max_parallel(stage), "dependency": f"afterok:{driver_job}"}
    ranks["additional_parameters"]["kill-on-invalid-dep"] = "yes"
    driver = jobs.driver_parameters(stage.name, "driver", "afterany:RANKS", ahead=stage.name)
    return ranks, driver, jobs.watcher_parameters(stage.name, "DRIVER", ahead=stage.name)


def _waiting_ranks(jobs: JobRequests, stage: Stage) -> range:
    """Return the ranks of a stage whose size is not known: as many as there may be in one array."""
    return range(min(jobs.ranks_of(stage).max_ranks, jobs.max_array_size))


def cancel_ahead(run_dir: RunDir, patience: float, kept: Sequence[QueuedJob] = ()) -> None:
    """End the jobs that were submitted ahead and have no work, but not those in ``kept``."""
    cancel_from_behind([job.id for job in jobs_ahead(run_dir, patience) if job not in kept])
