"""Defects that clusters have shown, each put back into the shipped code, and the schedules that show it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from sharmill import directing
from sharmill.engine import attempts, fence, locks, plan, run, time_limit, worker
from sharmill.engine.locks import LockOwner
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.executors import driven_rank
from sharmill.executors.slurm import chain, chain_state, executor, job_requests, queue, taken_units, task
from sharmill.executors.unit_queue import UnitQueue
from simulation import dataset
from simulation.world import Choice, Outcome, simulate


@dataclass(frozen=True)
class Defect:
    """A defect: what is exchanged, ``(owner, name, what takes its place)``, and which schedules are drawn.

    ``within`` is the number of seeds of which at least one shows it.
    """

    name: str
    patches: tuple[tuple[Any, str, Any], ...]
    choice: Choice
    within: int = 60

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Have the shipped code with the defect."""
        patched = [mock.patch.object(owner, name, other) for owner, name, other in self.patches]
        try:
            for one in patched:
                one.start()
            yield
        finally:
            mock.patch.stopall()

    def find(self, folder: Path) -> Outcome | None:
        """Return the first schedule in which something does not hold, or None."""
        with self.put_back():
            outcomes = (simulate(seed, folder, self.choice) for seed in range(self.within))
            found = next((outcome for outcome in outcomes if outcome.problems), None)
        # Else the schedule would show that the code has changed, and nothing of the defect.
        assert found is None or "TypeError" not in "".join(found.trace), f"{self.name}: it no longer fits the code"
        return found


def _nothing(*arguments: Any, **options: Any) -> None:
    pass


def _no_jobs(*arguments: Any, **options: Any) -> list[queue.QueuedJob]:
    return []


def _submit_no_watcher(
    self: executor.SlurmExecutor, stage: Stage | None, behind: list[str], submitted: list[str]
) -> None:
    dependency = "afterany:" + ":".join(executor.parent_ids(behind)) if behind else None
    submitted += self.submit(self.driver_parameters("next", "driver", dependency), None, [self.driver_job])


_is_dead = locks.FolderLock._is_dead


def _is_dead_here_only(self: locks.FolderLock, seen: locks._Seen) -> bool:
    return seen.owner.is_here and _is_dead(self, seen)


_retrying = queue.retrying


def _give_up_early(patience: float, retry: Any) -> Any:
    # As tenacity's own stop_before_delay does.
    return _retrying(patience * 0.8, retry)


_executor = chain.JobChain.executor


def _impatient(self: chain.JobChain, *arguments: Any) -> executor.SlurmExecutor:
    made = _executor(self, *arguments)
    return replace(
        made, driver_job=replace(made.driver_job, patience=0.0), watcher_job=replace(made.watcher_job, patience=0.0)
    )


def _never_by_ranks(self: chain.JobChain, small_stages: Any = "driver") -> executor.SlurmExecutor:
    return _executor(self, "here" if small_stages == "ranks" else small_stages)


def _jobs_until_withdrawn(run_dir: RunDir) -> list[queue.QueuedJob]:
    state = chain_state.read_state(run_dir)
    return [] if state is not None and state.is_withdrawn else queue.queued_jobs(run_dir)


def _jobs_with_work(run_dir: RunDir) -> list[queue.QueuedJob]:
    return [job for job in queue.queued_jobs(run_dir) if not job.ahead]


_lock_owner = chain_state.lock_owner


def _owner_in_job(folder: Path) -> LockOwner | None:
    owner = _lock_owner(folder)
    return owner if owner is not None and owner.job else None


def _excuse_lost_unit(self: driven_rank.DrivenRank, unit_queue: UnitQueue, *arguments: Any, **options: Any) -> None:
    if self.unit is not None:
        unit_queue.give_back(self.unit)


_write_atomic = executor.write_atomic


def _write_no_mark(path: Path, content: bytes) -> None:
    if content != b"driver":
        _write_atomic(path, content)


DEFECTS = (
    Defect(
        "ranks of a replaced plan go on publishing",
        (
            (plan, "remove_fences", _nothing), (dataset, "stop_ranks", _nothing), (fence, "remove_at_once", _nothing),
            (worker, "require_current", _nothing), (task, "require_current", _nothing),
        ),
        Choice(("run --restart --take-over",), ""),
    ),
    Defect(
        "the guard sees no jobs",
        ((queue, "_find_jobs", lambda run_dir, patience: []),),
        Choice(("second submission",), ""),
    ),
    Defect(
        "a dataset directory is not claimed while a run is at work on it",
        ((plan, "claim_output", _nothing), (run, "claim_output", _nothing), (directing, "claim_for_run", _nothing)),
        Choice(("submission of another run",), ""),
    ),
    Defect(
        "a dataset directory is claimed by the first stage that publishes there, and not by its submission",
        ((directing, "claim_for_run", _nothing),),
        Choice(("submission of another run",), ""),
    ),
    Defect(
        "no watcher job behind a driver job",
        ((executor.SlurmExecutor, "_submit_driver_job", _submit_no_watcher),),
        Choice(("kill -9 of the next job", "kill -9"), ""),
    ),
    Defect(
        "nothing notes the end of a driver job",
        ((chain.JobChain, "_note_end", _nothing), (executor.SlurmExecutor, "_submit_driver_job", _submit_no_watcher)),
        Choice(("ranks cannot start",), ""),
    ),
    Defect(
        "a submission or a driver job does not see the jobs beside which it must submit none",
        ((chain, "competing_jobs", _no_jobs), (executor, "competing_jobs", _no_jobs)),
        Choice(("second submission", "cancel"), ""),
    ),
    Defect(
        "a lock that holds nobody back",
        ((locks.FolderLock, "__enter__", _nothing), (locks.FolderLock, "__exit__", _nothing)),
        Choice(("second submission", "started twice"), ""),
    ),
    Defect(
        "a lock of a process that was killed on another host holds for ever",
        ((locks.FolderLock, "_is_dead", _is_dead_here_only),),
        Choice(("kill -9 of the next job",), ""),
    ),
    Defect(
        "a driver job does not wait for a controller that is away",
        ((chain.JobChain, "executor", _impatient), (chain.JobChain, "_may_wait_on", lambda self, error: False)),
        Choice(("controller away",), ""),
    ),
    Defect(
        "who waits gives up a little early, and is taken for one that did not wait",
        ((queue, "retrying", _give_up_early), (job_requests, "retrying", _give_up_early)),
        Choice(("MaxSubmitJobs",), ""),
    ),
    Defect(
        "a unit that hangs is excused each time",
        ((task, "_MOST_OF_THE_TIME", math.inf), (attempts, "MOST_INTERRUPTIONS", math.inf)),
        Choice((), "hang", driver_units=0),
    ),
    Defect(
        "nothing limits a unit that hangs, but the time of its job",
        ((time_limit.TimeLimit, "of", lambda self, unit: None),),
        Choice((), "hang"),
    ),
    Defect(
        "a unit that ends its worker each time is excused for ever",
        ((driven_rank.DrivenRank, "report_lost_unit", _excuse_lost_unit),),
        Choice((), "kill", driver_units=4, workers=2),
    ),
    Defect(
        "the unit of a worker that was killed is lost",
        ((driven_rank.DrivenRank, "report_lost_unit", _nothing),),
        Choice(("worker killed",), "", event="driver", driver_units=4, workers=2),
    ),
    Defect(
        "a chain goes on beside its jobs on another cluster",
        ((chain, "require_same_cluster", _nothing), (chain_state, "require_same_cluster", _nothing)),
        Choice(("submission on another cluster",), "", event="rank"),
    ),
    Defect(
        "ranks that never begin a unit are submitted for ever",
        ((executor.SlurmExecutor, "_require_progress", _nothing),),
        Choice(("ranks cannot start",), ""),
    ),
    Defect(
        "a rank begins units that others have taken",
        ((taken_units._TakenFiles, "make", lambda self, name: True),),
        Choice(("ranks cancelled",), ""),
    ),
    Defect(
        "a small stage that has ended its driver job is done by the next one",
        ((executor, "write_atomic", _write_no_mark), (chain.JobChain, "executor", _never_by_ranks)),
        Choice((), "kill"),
    ),
    Defect(
        "what was submitted ahead is left in the queue when the chain has ended",
        ((chain, "queued_jobs", _jobs_with_work),),
        Choice(("requeue",), "", submits_ahead=True),
    ),
    Defect(
        "a driver job takes no notice that it is told to end",
        ((chain, "ended_by_sigterm", nullcontext),),
        Choice(("cancel",), "", event="driver", driver_units=4),
    ),
    Defect(
        "what is left of a cancelled chain goes on",
        ((chain, "require_not_withdrawn", _nothing), (executor, "require_not_withdrawn", _nothing)),
        Choice(("cancel of what cannot be reached",), "", event="driver", driver_units=4),
    ),
    Defect(
        "cancelling a run leaves its claims",
        ((fence, "release_unused", lambda run_dir: []),),
        Choice(("cancel",), ""),
    ),
    Defect(
        "cancelling a chain does not wait for a submission on another host",
        ((chain_state, "lock_owner", _owner_in_job),),
        Choice(("cancel",), "", event="sbatch"),
    ),
    Defect(
        "cancelling a chain leaves its state as it was",
        ((chain_state, "_note_ended", _nothing),),
        Choice(("cancel",), ""),
    ),
    Defect(
        "cancelling a chain does not wait until its jobs are gone",
        ((chain_state, "queued_jobs", _jobs_until_withdrawn), (chain_state, "lock_owner", _nothing)),
        Choice(("cancel",), ""),
    ),
)  # fmt: skip
