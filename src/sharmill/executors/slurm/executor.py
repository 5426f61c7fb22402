"""The SLURM executor, on submitit: one task of a job array is one rank.

It does not wait. It submits the ranks and, behind them, a driver job that runs the same stages again: what is missing
then is submitted anew, and what is complete is finalized. So no process has to live as long as the work does. What is
too little to wait in the queue for the driver job does itself, as the local executor would.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from tenacity import retry_if_exception_message, retry_if_exception_type

from sharmill.config.loading import check_one_line
from sharmill.engine.attempts import MAX_ATTEMPTS, MOST_INTERRUPTIONS, Attempts
from sharmill.engine.balance import pack
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import FailedAttempt, Finished, Submitted
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.stored import read_stored
from sharmill.engine.unit import Unit
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.local.executor import LocalExecutor
from sharmill.executors.signals import deferred_interrupts
from sharmill.executors.slurm import scheduler
from sharmill.executors.slurm.chain_state import require_not_withdrawn
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.queue import (
    PATIENCE_SECONDS,
    QueuedJob,
    Role,
    competing_jobs,
    describe_jobs,
    job_comment,
    make_run_id,
    max_array_size,
    outside_own_job,
    parent_ids,
    retrying,
    scancel,
)
from sharmill.executors.slurm.setup_lines import checked_lines, find_reason
from sharmill.executors.slurm.task import RankTask
from sharmill.processes import limit_cores
from sharmill.storage import make_folder, make_private_folder, remove_tree, write_atomic

log = logging.getLogger(__name__)

_JOB_FILE = re.compile(r"(\d+)_")
# About two runs of all stages; no rank of an earlier one is left.
_MOST_JOBS = 50
# A busy controller, or a limit on jobs in the queue; anything else that sbatch says is about what was asked for.
_MAY_PASS = re.compile(
    r".*(timed out|temporarily|unable to contact|connection|communicat|(?:Max|Grp)Submit\w*Limit)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class SlurmExecutor:
    """Submits ranks, ``driver_job`` behind them, and ``watcher_job`` for the case that this does not end well.

    All nodes share the file system of ``run_dir``. ``watcher_setup`` are shell lines that begin the watcher job, and
    ``patience`` is how many seconds to go on trying where SLURM does not answer or takes no more jobs.
    ``small_stages`` says who does a stage with few units: a driver job to be submitted, ranks, or this process, which
    is a driver job. Both jobs are called with the name of their stage and the token of its plan, if that is known, and
    ``had_ranks`` is false where none have run before them.
    """

    profile: ClusterProfile
    run_dir: RunDir
    driver_job: Callable[..., Any]
    watcher_job: Callable[..., Any]
    job_name: str
    watcher_setup: tuple[str, ...] = ()
    patience: float = PATIENCE_SECONDS
    small_stages: Literal["driver", "ranks", "here"] = "driver"

    def __post_init__(self) -> None:
        # It is in lines of the sbatch script.
        check_one_line(str(self.run_dir.path.absolute()), "the path of the run directory")

    def run(
        self, stage: Stage, units: Sequence[Unit], rejects: RejectLimit, listener: Listener
    ) -> Finished | Submitted:
        """Submit the units, or return those that failed for good once no other is left; see ``engine.run.Executor``.

        Few units are done in the driver job. If that is killed, they wait for ranks in the next round.

        Raises:
            ConfigError: jobs of this dataset are in the queue, or a user has ended its chain.
            FatalError: a rank stopped the stage, ranks end without beginning a unit, or SLURM refuses the jobs.
        """
        require_not_withdrawn(self.run_dir)
        attempts = Attempts(stage.dir.attempts)
        if attempts.stopped:
            raise FatalError(attempts.stopped, code=attempts.stopped_code)
        left = [unit for unit in units if attempts.counts[unit.index] < MAX_ATTEMPTS]
        if not left:
            return Finished({unit.index: _describe_failure(stage, unit, attempts) for unit in units})
        is_small = self.small_stages != "ranks" and not stage.dir.rounds.exists()
        workers = self.driver_workers(stage, left) if is_small else 0
        if not workers:
            self._require_progress(stage, attempts)
        make_run_id(self.run_dir)
        if others := competing_jobs(self.run_dir, self.patience):
            raise ConfigError(f"{describe_jobs(others)} of this dataset appeared in the queue", code="jobs_in_queue")
        if not workers:
            return self._submit_stage(stage, left, rejects)
        if self.small_stages == "driver":
            driver_job = self.submit_driver_job([], stage)
            return Submitted(f"{stage.name}: {len(left)} units in driver job {driver_job} itself", [driver_job])
        # Where this process is killed, ranks are to go on.
        write_atomic(stage.dir.rounds, b"driver")
        log.info("%s: %d units are done here, on %d workers", stage.name, len(left), workers)
        limit_cores(self.profile.for_stage("driver", uses_gpu=False).cores)
        return LocalExecutor(workers, device="cpu").run(stage, left, rejects, listener)

    def script(self, stage: Stage, num_ranks: int) -> str:
        """Return the sbatch script of the first array of a stage's ranks, to be shown."""
        array, parallel = self.arrays(stage, num_ranks)[0]
        parameters = self._parameters(stage.name, "rank", self._ranks_of(stage))
        request = self._request(parameters | {"array_parallelism": parallel}, self.profile.python)
        return scheduler.script(request, num_tasks=len(array))

    def driver_script(self, stage: Stage, *, behind_ranks: bool) -> str:
        """Return the sbatch script of the driver job behind a stage's ranks, to be shown; or of one without ranks."""
        dependency = "afterany:RANKS" if behind_ranks else None
        return scheduler.script(self._request(self._driver_parameters(stage.name, "driver", dependency), None))

    def watcher_script(self, stage: Stage) -> str:
        """Return the sbatch script of the watcher job behind a driver job, to be shown."""
        return scheduler.script(self._request(self._watcher_parameters(stage.name, "DRIVER"), None))

    def driver_workers(self, stage: Stage, units: Sequence[Unit]) -> int:
        """Return the number of workers with which a driver job does a stage itself, or 0 where ranks are to do it."""
        workers = 0 if stage.uses_gpu else self.profile.driver_workers(self._ranks_of(stage))
        hours = sum(unit.cost for unit in units) / 3600 if stage.cost_unit == "seconds of audio" else 0.0
        fits = len(units) <= self.profile.driver_units * workers and hours <= self.profile.driver_hours
        return min(workers, len(units)) if fits else 0

    def bins(self, stage: Stage, units: Sequence[Unit]) -> list[list[Unit]]:
        """Return the units of each rank: as many ranks as the profile allows, each with units, balanced by cost."""
        # So many arrays that not each could have a rank running would break max_parallel.
        most = max_array_size(self.patience) * self._max_parallel(stage)
        return pack_units(units, min(self._ranks_of(stage).max_ranks, most))

    def arrays(self, stage: Stage, num_ranks: int) -> list[tuple[range, int]]:
        """Return the ranks of each job array, as large as the cluster allows, and how many of them may run at once."""
        largest = max_array_size(self.patience)
        ranges = [range(start, min(start + largest, num_ranks)) for start in range(0, num_ranks, largest)]
        return [(ranks, max(1, self._max_parallel(stage) * len(ranks) // num_ranks)) for ranks in ranges]

    def _ranks_of(self, stage: Stage) -> RankProfile:
        return self.profile.for_stage(stage.name, stage.uses_gpu)

    def _max_parallel(self, stage: Stage) -> int:
        parallel = self._ranks_of(stage).max_parallel or self.profile.max_parallel
        return min(parallel, self.profile.max_parallel_all or parallel)

    def submit_driver_job(self, behind: Sequence[QueuedJob], stage: Stage | None) -> str:
        """Submit the driver job of a stage behind jobs that are in the queue already, if any, and return its number."""
        submitted: list[str] = []
        with deferred_interrupts(), outside_own_job(), _cancelled_on_error(submitted):
            self._submit_driver_job(stage, [job.id for job in behind], submitted)
        return submitted[0]

    def _submit_stage(self, stage: Stage, left: list[Unit], rejects: RejectLimit) -> Submitted:
        # No rank of an earlier round is left: units that they had taken and did not end are free again. A folder of
        # another name is none that a node still sees as it was.
        round = uuid4().hex
        remove_tree(stage.dir.taken)
        make_folder(stage.dir.taken / round)
        profile = self._ranks_of(stage)
        limit = profile.timeout_min * 60.0 - self.profile.signal_s
        tasks = [
            RankTask(stage, rank, [unit.index for unit in part], profile.device, rejects, limit, round)
            for rank, part in enumerate(self.bins(stage, left))
        ]
        ranks: list[str] = []
        drivers: list[str] = []
        with deferred_interrupts(), outside_own_job(), _cancelled_on_error(ranks), _cancelled_on_error(drivers):
            self._submit_ranks(stage, tasks, ranks)
            self._submit_driver_job(stage, ranks, drivers)
        with suppress(OSError):
            _forget_old_jobs(self.run_dir.jobs, {int(job) for job in parent_ids([*ranks, *drivers])})
        message = (
            f"{stage.name}: {len(left)} units on {len(ranks)} ranks (job {', '.join(parent_ids(ranks))}), "
            f"then driver job {drivers[0]}"
        )
        return Submitted(message, [*ranks, drivers[0]])

    def _submit_ranks(self, stage: Stage, tasks: list[RankTask], ranks: list[str]) -> None:
        """Submit the ranks, and add the numbers of their jobs to ``ranks``."""
        parameters = self._parameters(stage.name, "rank", self._ranks_of(stage))
        for array, parallel in self.arrays(stage, len(tasks)):
            part = tasks[array.start : array.stop]
            ranks += self._submit(parameters | {"array_parallelism": parallel}, self.profile.python, part)

    def _submit_driver_job(self, stage: Stage | None, behind: list[str], submitted: list[str]) -> None:
        """Submit a driver job and its watcher job, and add their numbers to ``submitted``."""
        name = "others" if stage is None else stage.name
        told: dict[str, Any] = {}
        if stage is not None and (token := stage.token or stage.dir.read_token()):
            told = {"stage": stage.name, "token": token, "had_ranks": bool(behind)}
        dependency = "afterany:" + ":".join(parent_ids(behind)) if behind else None
        driver = self._driver_parameters(name, "driver", dependency)
        submitted += self._submit(driver, None, [partial(self.driver_job, **told)])
        watcher = self._watcher_parameters(name, submitted[-1])
        submitted += self._submit(watcher, None, [partial(self.watcher_job, **told)])

    def _watcher_parameters(self, name: str, driver_job: str) -> dict[str, Any]:
        watcher = self._driver_parameters(name, "watcher", f"afternotok:{driver_job}")
        watcher["additional_parameters"]["kill-on-invalid-dep"] = "yes"
        watcher["setup"] = [*self.watcher_setup, *watcher.get("setup", [])]
        return watcher

    def _driver_parameters(self, name: str, role: Role, dependency: str | None) -> dict[str, Any]:
        """Return the parameters of a driver job; behind ranks ``afterany``, for the ledger says what is left to do."""
        parameters = self._parameters(f"{name}-{role}", role, self.profile.for_stage("driver", False))
        # It submits jobs, so it runs outside of a container, with the interpreter that runs here.
        parameters.pop("srun_args", None)
        return parameters | {"use_srun": False} | ({"dependency": dependency} if dependency else {})

    def _submit(self, parameters: dict[str, Any], python: str | None, tasks: Sequence[Callable[[], Any]]) -> list[str]:
        """Submit one job, or one array, and return the numbers of its tasks."""
        failed_job_error = scheduler.failed_job_error()
        # If sbatch gives up waiting and the job is there nevertheless, it does no harm: its tasks end because they find
        # nothing to run, or do the same units as others.
        may_pass = retry_if_exception_type(failed_job_error) & retry_if_exception_message(match=_MAY_PASS)
        try:
            return retrying(self.patience, may_pass)(self._try_to_submit, parameters, python, tasks)
        except failed_job_error as error:
            message = f"SLURM refuses the jobs: {' '.join(str(error).split())}"
            raise FatalError(message, code="jobs_refused") from error

    def _try_to_submit(
        self, parameters: dict[str, Any], python: str | None, tasks: Sequence[Callable[[], Any]]
    ) -> list[str]:
        # The pickled tasks have the configuration with all that the environment gave it.
        make_private_folder(self.run_dir.jobs)
        return scheduler.submit(self._request(parameters, python), tasks)

    def _request(self, parameters: dict[str, Any], python: str | None) -> scheduler.JobRequest:
        return scheduler.JobRequest(self.run_dir.jobs, parameters, python, self.profile.max_requeues)

    def _parameters(self, name: str, role: Role, profile: RankProfile) -> dict[str, Any]:
        cluster = self.profile
        comment = " ".join([*filter(None, [profile.extra.get("comment")]), job_comment(self.run_dir, role)])
        values: dict[str, Any] = {
            "job_name": f"{self.job_name}-{name.replace('/', '-')}",
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

    def _require_progress(self, stage: Stage, attempts: Attempts) -> None:
        """Raise FatalError where ranks end again and again without doing anything: nothing would ever end that."""
        mark = stage.dir.rounds
        now = sum(attempts.counts.values()) + sum(attempts.interruptions.values()) - attempts.broken_nodes
        before = read_stored(mark).decode(errors="replace").split() if mark.exists() else []
        if len(before) >= MAX_ATTEMPTS and set(before[-MAX_ATTEMPTS:]) == {str(now)}:
            reason = attempts.setup_error or find_reason(self.run_dir.jobs, mark.stat().st_mtime)
            reason = reason or f"see the logs in {self.run_dir.jobs} and {stage.dir.logs}"
            message = f"{stage.name}: the ranks ended {MAX_ATTEMPTS} times without doing a unit: {reason}"
            raise FatalError(message, code="no_ranks")
        write_atomic(mark, " ".join([*before, str(now)]).encode())


@contextmanager
def _cancelled_on_error(jobs: list[str]) -> Iterator[None]:
    """Cancel jobs if those behind them cannot be submitted: without a driver job nothing would come of their work."""
    try:
        yield
    except BaseException:
        scancel(parent_ids(jobs))
        raise


def _forget_old_jobs(folder: Path, keep: Container[int]) -> None:
    """Remove the files of all but the last jobs: their scripts, input and output. Numbers of jobs may begin anew."""
    files: dict[int, list[Path]] = {}
    for path in folder.iterdir():
        if (match := _JOB_FILE.match(path.name)) is not None and int(match[1]) not in keep:
            files.setdefault(int(match[1]), []).append(path)
    by_age = sorted(files.values(), key=lambda paths: max(path.lstat().st_mtime for path in paths))
    for paths in by_age[:-_MOST_JOBS]:
        for path in paths:
            path.unlink(missing_ok=True)


def pack_units(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """Return the units of each rank, balanced by cost; never more ranks than units, and no rank without one."""
    ordered = list(units)
    # Units without cost would all be packed into one bin.
    costs = [max(unit.cost, 1e-3) for unit in ordered]
    return [[ordered[index] for index in part] for part in pack(costs, min(num_ranks, len(ordered))) if part]


def _describe_failure(stage: Stage, unit: Unit, attempts: Attempts) -> FailedAttempt:
    if unit.index in attempts.errors:
        return attempts.errors[unit.index]
    excused = min(attempts.interruptions[unit.index], MOST_INTERRUPTIONS)
    message = (
        f"its rank ended {attempts.counts[unit.index] + excused} times in the middle of it (killed, out of memory, out "
        f"of time, or the node was lost); see {stage.dir.logs}"
    )
    return FailedAttempt(unit.index, message, message)


def _container_arguments(cluster: ClusterProfile) -> list[str]:
    if cluster.container_image is None:
        return []
    mounts = [f"--container-mounts={','.join(cluster.container_mounts)}"] if cluster.container_mounts else []
    # Relative paths of the configuration are relative to this folder.
    return [f"--container-image={cluster.container_image}", *mounts, f"--container-workdir={Path.cwd()}"]
