"""Stages whose ranks are tasks of a SLURM array, in processes of their own, and whole chains of jobs, without SLURM."""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import Finished
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.executors.slurm import scheduler
from sharmill.executors.slurm.chain import ChainedDataset, JobChain
from sharmill.executors.slurm.executor import pack_units
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.scheduler import JobRequest
from sharmill.executors.slurm.task import RankTask
from sharmill.storage import make_folder

# A rank that waits for units of others looks again after so many seconds.
_SOON = mock.patch("sharmill.executors.slurm.taken_units._SECONDS_BETWEEN_LOOKS", new=0.02)


@dataclass(frozen=True)
class ForkedTasks:
    """Runs the tasks of an array as forks of this process, which is their driver job before and after.

    Models that stand in for others are theirs too.
    """

    ranks: int = 2

    def run(self, stage: Stage, units: Sequence[Unit], rejects: RejectLimit, listener: Listener) -> Finished:
        """Do the units; see ``engine.run.Executor``."""
        make_folder(stage.dir.taken)
        bins = pack_units(units, self.ranks)
        with _SOON:
            _run_forked(
                [RankTask(stage, rank, [u.index for u in part], "cpu", rejects) for rank, part in enumerate(bins)]
            )
        return Finished({})


@dataclass
class Queue:
    """Jobs that were submitted, in the place of SLURM; those of an array run side by side if ``is_forking``."""

    is_forking: bool
    jobs: deque[list[Callable[[], Any]]] = field(default_factory=deque)
    submitted: int = 0

    def is_here(self, command: str) -> bool:
        return True

    def run(self, command: Sequence[str], timeout: float) -> str:
        """Return what a cluster says that has no jobs, since each is over before somebody asks."""
        return "MaxArraySize = 1001\n" if command[0] == "scontrol" else ""

    def failed_job_error(self) -> type[Exception]:
        return OSError

    def submit(self, request: JobRequest, tasks: Sequence[Callable[[], Any]]) -> list[str]:
        """Take an array or a job, and return its numbers."""
        self.submitted += 1
        # A watcher job finds that its driver job has ended well.
        if not request.parameters["additional_parameters"]["comment"].endswith(":watcher"):
            self.jobs.append([*tasks])
        return [f"{self.submitted}_{number}" for number in range(len(tasks))]

    def run_all(self) -> None:
        """Run the jobs until none is left."""
        while self.jobs:
            tasks = self.jobs.popleft()
            if isinstance(tasks[0], RankTask) and self.is_forking:
                _run_forked(tasks)
                continue
            for task in tasks:
                task()


def run_chain(dataset: ChainedDataset, *, is_forking: bool) -> None:
    """Submit a dataset, and run its jobs until it is done."""
    queue = Queue(is_forking)
    with (
        mock.patch.multiple(
            scheduler, is_here=queue.is_here, run=queue.run, submit=queue.submit,
            failed_job_error=queue.failed_job_error,
        ),
        _SOON,
    ):  # fmt: skip
        JobChain(dataset, ClusterProfile(gpu=RankProfile(), max_parallel=2), command="sharmill submit").start()
        queue.run_all()


def _run_forked(tasks: Sequence[Callable[[], Any]]) -> None:
    """Run tasks side by side, each in a fork of this process."""
    children = []
    for task in tasks:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                task()
                status = 0
            except BaseException:  # noqa: BLE001 - shown, and then the child ends
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert not any(statuses), "a rank has failed"
