"""The state of a dataset's chain of jobs on SLURM, as all but its own jobs see it: to read, to wait for, to end."""

from __future__ import annotations

import logging
from typing import Literal

import msgspec

from sharmill.engine.rundir import RunDir
from sharmill.engine.stored import decode_stored, read_stored
from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.executors.slurm.queue import SlurmSilent, cluster_name, describe_jobs, parent_ids, queued_jobs, scancel
from sharmill.ports import clock
from sharmill.processes import user_name
from sharmill.storage import write_atomic

log = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
_SECONDS_BETWEEN_QUESTIONS = 10.0
# After its end was noted a driver job has little left to do, but a site may have something to clean up.
_SECONDS_TO_LEAVE_QUEUE = 60.0
# A process that takes no notice of SIGTERM is killed by SLURM after KillWait, which is 30 s by default.
_SECONDS_TO_CANCEL = 180.0


class ChainState(msgspec.Struct, kw_only=True):
    """State of a chain. ``jobs`` are those that were submitted last, ``command`` is what submits it again.

    ``submitting`` says that its first jobs are not in the queue yet. ``cluster`` is where its jobs are.
    """

    state: Literal["waiting", "done", "failed"]
    message: str
    jobs: list[str] = []
    findings: int = 0
    command: str = ""
    submitting: bool = False
    cluster: str = ""


def read_state(run_dir: RunDir) -> ChainState | None:
    """Return how far the chain of a run directory has got; None where there is none."""
    if not run_dir.chain.exists():
        return None
    return decode_stored(run_dir.chain, read_stored(run_dir.chain), ChainState)


def require_no_chain(run_dir: RunDir, *, take_over: bool = False) -> None:
    """Raise ConfigError if jobs of a run directory are in the queue, or may be there because nobody can be asked.

    With ``take_over`` nobody need be asked: the user says that there are none.
    """
    try:
        jobs = queued_jobs(run_dir)
    except SharmillError as error:
        state = read_state(run_dir)
        if take_over or (state is not None and state.state == "done"):
            return
        raise ConfigError(
            f"jobs that were submitted from {run_dir.path} may still be at work on it, and nobody can be asked here: "
            f"{error}; ask where squeue answers, or, if you know that none is left: sharmill run --take-over",
            code=error.code,
        ) from error
    if jobs:
        raise ConfigError(
            f"{describe_jobs(jobs)} of this dataset are still in the queue; wait for them (sharmill status "
            f"{run_dir.path}) or end them: scancel {' '.join(parent_ids([job.id for job in jobs]))}",
            code="jobs_in_queue",
        )
    if not take_over:
        require_same_cluster(run_dir)


def require_same_cluster(run_dir: RunDir) -> None:
    """Raise ConfigError if the chain of a run directory waits for jobs of a cluster that is not the one here."""
    state = read_state(run_dir)
    if state is None or state.state != "waiting" or not state.cluster or (here := cluster_name()) == state.cluster:
        return
    jobs = f" (jobs {', '.join(parent_ids(state.jobs))})" if state.jobs else ""
    raise ConfigError(
        f"its chain waits on the cluster {state.cluster}{jobs}, and this one is {here or 'none'}: sharmill cancel "
        f"{run_dir.path} ends it there; if you know that no job is left, add --take-over",
        code="jobs_elsewhere",
    )


def cancel_chain(run_dir: RunDir, wait_seconds: float = _SECONDS_TO_CANCEL) -> list[str]:
    """End all jobs of a run directory, and note it; return their numbers.

    Jobs that end may have submitted others before, so the queue is asked until it has none.

    Raises:
        ConfigError: there is no SLURM here to be asked, or the jobs are on another cluster.
        SlurmSilent: nobody answers.
        FatalError: jobs are still there after ``wait_seconds``.
    """
    ended: set[str] = set()
    deadline = clock.monotonic() + wait_seconds
    while jobs := queued_jobs(run_dir):
        if not ended:
            _note_cancelled(run_dir)
        if clock.monotonic() > deadline:
            raise FatalError(
                f"{describe_jobs(jobs)} are still in the queue {wait_seconds:.0f} s after scancel; ask again with "
                f"sharmill status {run_dir.path}, or end them: scancel {' '.join(parent_ids([j.id for j in jobs]))}",
                code="jobs_in_queue",
            )
        # A watcher job would begin in the place of its driver job, and that would submit the ranks again.
        order = ("watcher", "driver", "rank")
        ids = parent_ids([job.id for job in jobs])
        roles = {parent_ids([job.id])[0]: order.index(job.role) for job in jobs}
        ended.update(ids)
        scancel(sorted(ids, key=lambda number: roles[number]))
        clock.sleep(_POLL_SECONDS)
    if not ended:
        require_same_cluster(run_dir)
    else:
        # A driver job may have noted that it waits for what it had submitted.
        _note_cancelled(run_dir)
    return sorted(ended, key=int)


def _note_cancelled(run_dir: RunDir) -> None:
    before = read_state(run_dir) or ChainState(state="failed", message="")
    message = f"cancelled by {user_name()}; what is done is kept"
    state = msgspec.structs.replace(before, state="failed", message=message, jobs=[])
    write_atomic(run_dir.chain, msgspec.json.encode(state) + b"\n")


def wait_for_end(run_dir: RunDir) -> ChainState:
    """Wait until a chain is done or has failed, and its jobs have left the queue.

    Raises:
        FatalError: its jobs are gone and it has not come to an end.
    """
    next_question = 0.0
    ended: float | None = None
    while True:
        state = read_state(run_dir)
        assert state is not None
        if state.state != "waiting":
            ended = ended or clock.monotonic()
            if clock.monotonic() - ended > _SECONDS_TO_LEAVE_QUEUE or not _may_have_jobs(run_dir):
                return state
        elif clock.monotonic() >= next_question:
            next_question = clock.monotonic() + _SECONDS_BETWEEN_QUESTIONS
            if _is_deserted(run_dir, state):
                raise FatalError(
                    f"the jobs have ended before the work did; see {run_dir.jobs}, and submit again to go on",
                    code="jobs_gone",
                )
        clock.sleep(_POLL_SECONDS)


def _is_deserted(run_dir: RunDir, state: ChainState) -> bool:
    """Return True if no job is left that could continue the chain. Asked twice: its last job may just have ended."""
    for _ in range(2):
        if _may_have_jobs(run_dir):
            return False
        clock.sleep(_POLL_SECONDS)
        if read_state(run_dir) != state:
            return False
    return True


def _may_have_jobs(run_dir: RunDir) -> bool:
    try:
        return bool(queued_jobs(run_dir))
    except SlurmSilent as error:
        log.warning("%s", error)
        return True
