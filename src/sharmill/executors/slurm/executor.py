"""The SLURM executor, on submitit: one task of a job array is one rank.

It does not wait. It submits the ranks and, behind them, a driver job that runs the same stages again: what is missing
then is submitted anew, and what is complete is finalized. So no process has to live as long as the work does. What is
too little to wait in the queue for the driver job does itself, as the local executor would.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from sharmill.engine.attempts import MAX_FAILURES, Attempts
from sharmill.engine.balance import pack
from sharmill.engine.host import limit_cores
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import Finished, Submitted
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.run import Unlocked
from sharmill.engine.stage import Stage
from sharmill.engine.state import begin_round, end_attempts
from sharmill.engine.stored import read_stored
from sharmill.engine.unit import Unit
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.local import LocalExecutor
from sharmill.executors.signals import deferred_interrupts
from sharmill.executors.slurm import scheduler
from sharmill.executors.slurm.chain_state import require_not_withdrawn
from sharmill.executors.slurm.job_requests import JobRequests, cancelled_on_error
from sharmill.executors.slurm.queue import (
    QueuedJob,
    competing_jobs,
    describe_jobs,
    make_run_id,
    outside_own_job,
    parent_ids,
)
from sharmill.executors.slurm.setup_lines import find_reason
from sharmill.executors.slurm.task import RankTask
from sharmill.storage import write_atomic

log = logging.getLogger(__name__)

_JOB_FILE = re.compile(r"(\d+)_")
# About two runs of all stages; no rank of an earlier one is left.
_MOST_JOBS = 50


@dataclass(frozen=True)
class SlurmExecutor(JobRequests):
    """Submits ranks, ``driver_job`` behind them, and ``watcher_job`` for the case that this does not end well.

    ``small_stages`` says who does a stage with few units: a driver job to be submitted, ranks, or this process, which
    is a driver job. ``note`` is called with what was submitted before anything may interrupt this process.
    """

    small_stages: Literal["driver", "ranks", "here"] = "driver"
    note: Callable[[Submitted], object] = lambda submitted: None

    def run(
        self, stage: Stage, units: Sequence[Unit], rejects: RejectLimit, listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> Finished | Submitted:  # fmt: skip
        """Submit the units, or return those that failed for good once no other is left; see ``engine.run.Executor``.

        Few units are done in the driver job. If that is killed, they wait for ranks in the next round.

        Raises:
            ConfigError: jobs of this dataset are in the queue, or a user has ended its chain.
            FatalError: a rank stopped the stage, ranks end without beginning a unit, or SLURM refuses the jobs.
        """
        require_not_withdrawn(self.run_dir)
        goes_on = stage.dir.rounds.exists()
        attempts = Attempts(stage.dir.attempts)
        if goes_on:
            end_attempts(stage.dir, {unit.index for unit in units})
            attempts.look()
            if (stopped := attempts.stopped()) is not None:
                raise stopped
        left = [unit for unit in units if not attempts.is_given_up(unit.index, ())]
        if not left:
            return Finished({unit.index: attempts.require_error(unit.index) for unit in units})
        is_small = self.small_stages != "ranks" and not goes_on
        workers = self.driver_workers(stage, left) if is_small else 0
        if not workers:
            self._require_progress(stage, attempts)
        make_run_id(self.run_dir)
        if others := competing_jobs(self.run_dir, self.patience):
            raise ConfigError(f"{describe_jobs(others)} of this dataset appeared in the queue", code="jobs_in_queue")
        if not workers:
            return self._submit_stage(stage, left, rejects, goes_on=goes_on)
        if self.small_stages == "driver":
            with deferred_interrupts():
                driver_job = self.submit_driver_job([], stage)
                message = f"{stage.name}: {len(left)} units in driver job {driver_job} itself"
                return self._noted(Submitted(message, [driver_job]))
        # Where this process is killed, ranks are to go on.
        write_atomic(stage.dir.rounds, b"driver")
        log.info("%s: %d units are done here, on %d workers", stage.name, len(left), workers)
        limit_cores(self.profile.for_stage("driver", uses_gpu=False).cores)
        return LocalExecutor(workers, device="cpu").run(stage, left, rejects, listener, unlocked)

    def script(self, stage: Stage, num_ranks: int) -> str:
        """Return the sbatch script of the first array of a stage's ranks, to be shown."""
        array, parallel = self.arrays(stage, num_ranks)[0]
        parameters = self.parameters(stage.name, "rank", self.ranks_of(stage))
        request = self.request(parameters | {"array_parallelism": parallel}, self.profile.python)
        return scheduler.script(request, num_tasks=len(array))

    def driver_script(self, stage: Stage, *, behind_ranks: bool) -> str:
        """Return the sbatch script of the driver job behind a stage's ranks, to be shown; or of one without ranks."""
        dependency = "afterany:RANKS" if behind_ranks else None
        return scheduler.script(self.request(self.driver_parameters(stage.name, "driver", dependency), None))

    def watcher_script(self, stage: Stage) -> str:
        """Return the sbatch script of the watcher job behind a driver job, to be shown."""
        return scheduler.script(self.request(self.watcher_parameters(stage.name, "DRIVER"), None))

    def driver_workers(self, stage: Stage, units: Sequence[Unit]) -> int:
        """Return the number of workers with which a driver job does a stage itself, or 0 where ranks are to do it."""
        workers = 0 if stage.uses_gpu else self.profile.driver_workers(self.ranks_of(stage))
        hours = sum(unit.cost for unit in units) / 3600 if stage.cost_unit == "seconds of audio" else 0.0
        fits = len(units) <= self.profile.driver_units * workers and hours <= self.profile.driver_hours
        return min(workers, len(units)) if fits else 0

    def bins(self, stage: Stage, units: Sequence[Unit]) -> list[list[Unit]]:
        """Return the units of each rank: as many ranks as the profile allows, each with units, balanced by cost."""
        # So many arrays that not each could have a rank running would break max_parallel.
        most = self.max_array_size * self.max_parallel(stage)
        return pack_units(units, min(self.ranks_of(stage).max_ranks, most))

    def submit_driver_job(self, behind: Sequence[QueuedJob], stage: Stage | None) -> str:
        """Submit the driver job of a stage behind jobs that are in the queue already, if any, and return its number."""
        submitted: list[str] = []
        with deferred_interrupts(), outside_own_job(), cancelled_on_error(submitted):
            self._submit_driver_job(stage, [job.id for job in behind], submitted)
        return submitted[0]

    def _submit_stage(self, stage: Stage, left: list[Unit], rejects: RejectLimit, *, goes_on: bool) -> Submitted:
        profile = self.ranks_of(stage)
        num_ranks = len(self.bins(stage, left))
        numbers = begin_round(stage, left, num_ranks, rejects, goes_on=goes_on, waits=False)
        limit = profile.timeout_min * 60.0 - self.profile.signal_s
        tasks = [RankTask(stage, number, profile.device, limit) for number in numbers]
        ranks: list[str] = []
        drivers: list[str] = []
        with deferred_interrupts(), outside_own_job(), cancelled_on_error(ranks), cancelled_on_error(drivers):
            self._submit_ranks(stage, tasks, ranks)
            self._submit_driver_job(stage, ranks, drivers)
            submitted = self._noted(_describe_ranks(stage, left, ranks, drivers[0]))
        with suppress(OSError):
            _forget_old_jobs(self.run_dir.jobs, {int(job) for job in parent_ids([*ranks, *drivers])})
        return submitted

    def _noted(self, submitted: Submitted) -> Submitted:
        self.note(submitted)
        return submitted

    def _submit_ranks(self, stage: Stage, tasks: list[RankTask], ranks: list[str]) -> None:
        """Submit the ranks, and add the numbers of their jobs to ``ranks``."""
        parameters = self.parameters(stage.name, "rank", self.ranks_of(stage))
        for array, parallel in self.arrays(stage, len(tasks)):
            part = tasks[array.start : array.stop]
            ranks += self.submit(parameters | {"array_parallelism": parallel}, self.profile.python, part)

    def _submit_driver_job(self, stage: Stage | None, behind: list[str], submitted: list[str]) -> None:
        """Submit a driver job and its watcher job, and add their numbers to ``submitted``."""
        name = "others" if stage is None else stage.name
        told = self.told(stage, had_ranks=bool(behind))
        dependency = "afterany:" + ":".join(parent_ids(behind)) if behind else None
        driver = self.driver_parameters(name, "driver", dependency)
        submitted += self.submit(driver, None, [partial(self.driver_job, **told)])
        watcher = self.watcher_parameters(name, submitted[-1])
        submitted += self.submit(watcher, None, [partial(self.watcher_job, **told)])

    def _require_progress(self, stage: Stage, attempts: Attempts) -> None:
        """Raise FatalError where ranks end again and again without doing anything: nothing would ever end that."""
        mark = stage.dir.rounds
        now = attempts.num_begun
        before = read_stored(mark).decode(errors="replace").split() if mark.exists() else []
        if len(before) >= MAX_FAILURES and set(before[-MAX_FAILURES:]) == {str(now)}:
            if attempts.slots_out():
                raise attempts.all_out_error(stage.name, stage.dir.logs)
            reason = find_reason(self.run_dir.jobs, mark.stat().st_mtime)
            reason = reason or f"see the logs in {self.run_dir.jobs} and {stage.dir.logs}"
            message = f"{stage.name}: the ranks ended {MAX_FAILURES} times without doing a unit: {reason}"
            raise FatalError(message, code="no_ranks")
        write_atomic(mark, " ".join([*before, str(now)]).encode())


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


def _describe_ranks(stage: Stage, left: list[Unit], ranks: list[str], driver: str) -> Submitted:
    message = (
        f"{stage.name}: {len(left)} units on {len(ranks)} ranks (job {', '.join(parent_ids(ranks))}), "
        f"then driver job {driver}"
    )
    return Submitted(message, [*ranks, driver])


def pack_units(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """Return the units of each rank, balanced by cost; never more ranks than units, and no rank without one."""
    ordered = list(units)
    # Units without cost would all be packed into one bin.
    costs = [max(unit.cost, 1e-3) for unit in ordered]
    return [[ordered[index] for index in part] for part in pack(costs, min(num_ranks, len(ordered))) if part]
