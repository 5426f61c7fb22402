"""The SLURM executor, on submitit: one task of a job array is one rank.

It does not wait. It submits the ranks and, behind them, a continuation that runs the same stages again: what is missing
then is submitted anew, and what is complete is finalized. So no process has to live as long as the work does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception_message,
    retry_if_exception_type,
    stop_after_attempt,
    wait_fixed,
)

from sharmill.engine.attempts import Attempts
from sharmill.engine.balance import pack
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import FailedAttempt
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.engine.worker import MAX_ATTEMPTS
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.signals import deferred_interrupts
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.queue import QueuedJob, cancel, max_array_size, outside_own_job, queued_jobs
from sharmill.executors.slurm.task import RankTask
from sharmill.storage import write_atomic

log = logging.getLogger(__name__)

_STEP_SUFFIX = "-next"
# A busy controller; anything else that sbatch says is about what was asked for.
_BUSY = re.compile(r".*(timed out|temporarily|unable to contact|connection|communicat)", re.IGNORECASE | re.DOTALL)
_PAUSE_SECONDS = 10.0


class Submitted(Exception):
    """The ranks of a stage are submitted, and a continuation behind them; this process has nothing left to do."""

    def __init__(self, stage: str, num_units: int, ranks: list[str], continuation: str) -> None:
        super().__init__(stage, num_units, ranks, continuation)
        self.stage = stage
        self.num_units = num_units
        self.ranks = ranks
        self.continuation = continuation

    def __str__(self) -> str:
        return (
            f"{self.stage}: {self.num_units} units on {len(self.ranks)} ranks (job {', '.join(_parents(self.ranks))}), "
            f"continued by job {self.continuation}"
        )


def _ignore(handed_over: Submitted) -> None:
    pass


@dataclass(frozen=True)
class SlurmExecutor:
    """Submits ranks. ``folder`` is on a file system that all nodes share; ``continuation`` is run after the ranks.

    ``note`` is told what has been submitted while the caller still holds the run directory's lock: the continuation,
    which takes the lock as well, may otherwise be faster.
    """

    profile: ClusterProfile
    folder: Path
    continuation: Callable[[], Any]
    job_name: str
    max_reject_fraction: float = 1.0
    note: Callable[[Submitted], None] = _ignore

    def run(self, stage: Stage, units: Sequence[Unit], listener: Listener) -> dict[int, FailedAttempt]:
        """The units that failed for good, once nothing else is left to do.

        Raises:
            Submitted: there were units to do, and they are submitted.
            ConfigError: others are at work on them.
            FatalError: a rank stopped the stage, ranks end without beginning a unit, or SLURM refuses the jobs.
        """
        attempts = Attempts(stage.dir.attempts)
        if attempts.stopped:
            raise FatalError(attempts.stopped)
        left = [unit for unit in units if attempts.counts[unit.index] < MAX_ATTEMPTS]
        if not left:
            return {unit.index: _describe_failure(stage, unit, attempts) for unit in units}
        self._require_progress(stage, attempts)
        if others := queued_jobs(self.folder):
            raise ConfigError(f"{describe_jobs(others)} of this dataset appeared in the queue")
        handed_over = self._hand_over(stage, left)
        raise handed_over

    def script(self, stage: Stage, num_ranks: int) -> str:
        """The sbatch script of the first array of a stage's ranks, for ``--dry-run``."""
        array, parallel = self.arrays(num_ranks)[0]
        parameters = self._parameters(stage.name, self.profile.for_stage(stage.uses_gpu))
        executor = self._submitit(parameters | {"array_parallelism": parallel}, self.profile.python)
        executor.parameters["map_count"] = len(array)
        return str(executor._make_submission_file_text(executor._submitit_command_str, "dry-run"))

    def bins(self, stage: Stage, units: Sequence[Unit]) -> list[list[Unit]]:
        """The units of each rank: as many ranks as the profile allows, each with units, balanced by cost."""
        # So many arrays that not each could have a rank running would break max_parallel.
        most = min(self.profile.for_stage(stage.uses_gpu).max_ranks, max_array_size() * self.profile.max_parallel)
        return pack_units(units, most)

    def arrays(self, num_ranks: int) -> list[tuple[range, int]]:
        """The ranks of each job array, as large as the cluster allows, and how many of them may run at once."""
        largest = max_array_size()
        ranges = [range(start, min(start + largest, num_ranks)) for start in range(0, num_ranks, largest)]
        return [(ranks, max(1, self.profile.max_parallel * len(ranks) // num_ranks)) for ranks in ranges]

    def go_on_behind(self, others: Sequence[QueuedJob]) -> str:
        """Submits a continuation behind jobs that are in the queue already, and returns its number."""
        with deferred_interrupts(), outside_own_job():
            return self._submit_continuation("others", [job.id for job in others])

    def _hand_over(self, stage: Stage, left: list[Unit]) -> Submitted:
        profile = self.profile.for_stage(stage.uses_gpu)
        limit = profile.timeout_min * 60.0 - self.profile.signal_s
        bins = self.bins(stage, left)
        tasks = [
            RankTask(stage, rank, [unit.index for unit in part], profile.device, limit, self.max_reject_fraction)
            for rank, part in enumerate(bins)
        ]
        ranks: list[str] = []
        with deferred_interrupts(), outside_own_job():
            try:
                self._submit_ranks(stage, tasks, ranks)
                continuation = self._submit_continuation(stage.name, ranks)
            except FatalError:
                # Without a continuation their work would lead nowhere.
                cancel(_parents(ranks))
                raise
            handed_over = Submitted(stage.name, len(left), ranks, continuation)
            self.note(handed_over)
        return handed_over

    def _submit_ranks(self, stage: Stage, tasks: list[RankTask], ranks: list[str]) -> None:
        """Adds the numbers of the jobs to ``ranks``."""
        parameters = self._parameters(stage.name, self.profile.for_stage(stage.uses_gpu))
        for array, parallel in self.arrays(len(tasks)):
            part = tasks[array.start : array.stop]
            ranks += self._submit(parameters | {"array_parallelism": parallel}, self.profile.python, part)

    def _submit_continuation(self, name: str, ranks: list[str]) -> str:
        parameters = self._parameters(name + _STEP_SUFFIX, self.profile.cpu)
        # afterany: whatever has become of the ranks, the ledger says what is left to do.
        parameters |= {"dependency": "afterany:" + ":".join(_parents(ranks)), "use_srun": False}
        # It submits jobs, so it runs outside of a container, with the interpreter that runs here.
        parameters.pop("srun_args", None)
        return self._submit(parameters, None, [self.continuation])[0]

    def _submit(self, parameters: dict[str, Any], python: str | None, tasks: Sequence[Callable[[], Any]]) -> list[str]:
        """One job, or one array, and the numbers of its tasks."""
        failed_job_error = _import_submitit().core.utils.FailedJobError
        # If sbatch gives up waiting and the job is there nevertheless, it does no harm: its tasks end for want of what
        # they should run, or do what others do as well.
        retrying = Retrying(
            stop=stop_after_attempt(3),
            wait=wait_fixed(_PAUSE_SECONDS),
            retry=retry_if_exception_type(failed_job_error) & retry_if_exception_message(match=_BUSY),
            before_sleep=before_sleep_log(log, logging.WARNING),
            reraise=True,
        )
        try:
            return retrying(self._try_to_submit, parameters, python, tasks)
        except failed_job_error as error:
            raise FatalError(f"SLURM refuses the jobs: {' '.join(str(error).split())}") from error

    def _try_to_submit(
        self, parameters: dict[str, Any], python: str | None, tasks: Sequence[Callable[[], Any]]
    ) -> list[str]:
        executor = self._submitit(parameters, python)
        with executor.batch():
            jobs = [executor.submit(task) for task in tasks]
        return [job.job_id for job in jobs]

    def _submitit(self, parameters: dict[str, Any], python: str | None) -> Any:
        requeues = self.profile.max_requeues
        executor = _import_submitit().SlurmExecutor(self.folder, max_num_timeout=requeues, python=python)
        executor.update_parameters(**parameters)
        return executor

    def _parameters(self, name: str, profile: RankProfile) -> dict[str, Any]:
        cluster = self.profile
        values: dict[str, Any] = {
            "job_name": f"{self.job_name}-{name.replace('/', '-')}",
            "partition": profile.partition,
            "account": cluster.account,
            "qos": cluster.qos,
            "cpus_per_task": profile.cores,
            "gpus_per_node": profile.gpus or None,
            "mem": f"{round(profile.memory_gb * 1024)}M",
            "time": profile.timeout_min,
            "signal_delay_s": cluster.signal_s,
            "setup": cluster.setup or None,
            "additional_parameters": {"requeue": True, **profile.extra},
            # From SLURM 22.05 on srun does not take over the cores of sbatch.
            "srun_args": [f"--cpus-per-task={profile.cores}", *_container_arguments(cluster)],
        }
        return {key: value for key, value in values.items() if value is not None}

    def _require_progress(self, stage: Stage, attempts: Attempts) -> None:
        """Ranks that cannot start would otherwise be submitted for ever."""
        mark = stage.dir.rounds
        now = sum(attempts.counts.values())
        before = mark.read_text().split() if mark.exists() else []
        if len(before) >= MAX_ATTEMPTS and set(before[-MAX_ATTEMPTS:]) == {str(now)}:
            reason = attempts.trouble or f"see the logs in {self.folder} and {stage.dir.logs}"
            raise FatalError(f"{stage.name}: the ranks ended {MAX_ATTEMPTS} times without beginning a unit: {reason}")
        write_atomic(mark, " ".join([*before, str(now)]).encode())


def _import_submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ConfigError("submitit is not installed: pip install 'sharmill[slurm]'") from error
    return submitit


def is_step(job: QueuedJob) -> bool:
    """Whether a job is a continuation."""
    return job.name.endswith(_STEP_SUFFIX)


def describe_jobs(jobs: Sequence[QueuedJob]) -> str:
    """A few words that name jobs, whatever their number."""
    named = ", ".join(job.id for job in jobs[:5])
    return f"jobs {named}" + (f" and {len(jobs) - 5} more" if len(jobs) > 5 else "")


def pack_units(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """The units of each rank, balanced by cost; never more ranks than units, and no rank without one."""
    ordered = list(units)
    # Units without cost would all be packed into one bin.
    costs = [max(unit.cost, 1e-3) for unit in ordered]
    return [[ordered[index] for index in part] for part in pack(costs, min(num_ranks, len(ordered))) if part]


def _parents(job_ids: Sequence[str]) -> list[str]:
    return sorted({job_id.split("_")[0] for job_id in job_ids}, key=int)


def _describe_failure(stage: Stage, unit: Unit, attempts: Attempts) -> FailedAttempt:
    if unit.index in attempts.errors:
        return attempts.errors[unit.index]
    message = (
        f"its rank ended {attempts.counts[unit.index]} times in the middle of it (killed, out of memory, out of time, "
        f"or the node was lost); see {stage.dir.logs}"
    )
    return FailedAttempt(unit.index, message, message)


def _container_arguments(cluster: ClusterProfile) -> list[str]:
    if cluster.container_image is None:
        return []
    mounts = [f"--container-mounts={','.join(cluster.container_mounts)}"] if cluster.container_mounts else []
    # Relative paths of the configuration are meant from here.
    return [f"--container-image={cluster.container_image}", *mounts, f"--container-workdir={Path.cwd()}"]
