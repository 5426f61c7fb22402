"""The state of a dataset's chain of jobs on SLURM, as all but its own jobs see it: to read, to wait for, to end."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Literal

import msgspec

from sharmill.engine.host import user_name
from sharmill.engine.locks import SLURM_JOB, lock_owner
from sharmill.engine.run import locked
from sharmill.engine.rundir import RunDir
from sharmill.engine.stored import decode_stored, read_stored
from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.executors.slurm.queue import SlurmSilent, cluster_name, describe_jobs, parent_ids, queued_jobs, scancel
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
    ``is_withdrawn`` says that a user has ended it: jobs that may be left submit nothing and note no state.
    """

    state: Literal["waiting", "done", "failed"]
    message: str
    jobs: list[str] = []
    findings: int = 0
    command: str = ""
    submitting: bool = False
    cluster: str = ""
    is_withdrawn: bool = False


def read_state(run_dir: RunDir) -> ChainState | None:
    """Return how far the chain of a run directory has got; None where there is none."""
    if not run_dir.chain.exists():
        return None
    return decode_stored(run_dir.chain, read_stored(run_dir.chain), ChainState)


def require_not_withdrawn(run_dir: RunDir) -> None:
    """Raise ConfigError if a user has ended the chain of a run directory since it was submitted."""
    state = read_state(run_dir)
    if state is not None and state.is_withdrawn:
        raise ConfigError(f"its chain was {state.message}", code="chain_withdrawn")


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
        f"its chain waits on the cluster {state.cluster}{jobs}, and this one is {here or 'none'}: end it there by "
        f"sharmill cancel {run_dir.path}; if you know that no job is left there, sharmill submit or run --take-over "
        "goes on here",
        code="jobs_elsewhere",
    )


def take_over_chain(run_dir: RunDir) -> None:
    """Note that the chain of a run directory has ended, since this process goes on. The caller holds its lock."""
    state = read_state(run_dir)
    if state is not None and state.state == "waiting":
        by = f"process {os.getpid()} of {user_name()} on {socket.gethostname()}"
        _note_ended(run_dir, f"taken over by {by}; what is done is kept")


def cancel_chain(run_dir: RunDir, wait_seconds: float = _SECONDS_TO_CANCEL) -> list[str]:
    """End all jobs of a run directory, and note it; return their numbers once none of them directs the run any more.

    Jobs that end may have submitted others before, so the queue is asked until it has none.

    Raises:
        ConfigError: there is no SLURM here to be asked, the jobs are on another cluster, or the process of one holds
            the run directory after ``wait_seconds``.
        SlurmSilent: nobody answers.
        FatalError: jobs are still there after ``wait_seconds``.
    """
    ended: set[str] = set()
    message = f"cancelled by {user_name()}; what is done is kept"
    deadline = time.monotonic() + wait_seconds
    while True:
        jobs = queued_jobs(run_dir)
        if not jobs:
            owner = lock_owner(run_dir.path)
            is_job = owner is not None and owner.job.removeprefix(SLURM_JOB) in ended
            if owner is None or not ended or (owner.is_here and not is_job):
                break
            # The process of a driver job may outlast its job for a while, and may just have submitted others. So may a
            # submission on another host, which also notes then that it waits for what was ended here.
            with locked(run_dir, max(0.0, deadline - time.monotonic())):
                continue
        if not ended:
            _note_ended(run_dir, message)
        if time.monotonic() > deadline:
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
        time.sleep(_POLL_SECONDS)
    if not ended:
        require_same_cluster(run_dir)
    else:
        # A submission may have noted that it waits for what was ended here.
        _note_ended(run_dir, message)
    return sorted(ended, key=int)


def _note_ended(run_dir: RunDir, message: str) -> None:
    before = read_state(run_dir) or ChainState(state="failed", message="")
    state = msgspec.structs.replace(before, state="failed", message=message, jobs=[], is_withdrawn=True)
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
            ended = ended or time.monotonic()
            if time.monotonic() - ended > _SECONDS_TO_LEAVE_QUEUE or not _may_have_jobs(run_dir):
                return state
        elif time.monotonic() >= next_question:
            next_question = time.monotonic() + _SECONDS_BETWEEN_QUESTIONS
            if _is_deserted(run_dir, state):
                raise FatalError(
                    f"the jobs have ended before the work did; see {run_dir.jobs}, and submit again to go on",
                    code="jobs_gone",
                )
        time.sleep(_POLL_SECONDS)


def _is_deserted(run_dir: RunDir, state: ChainState) -> bool:
    """Return True if no job is left that could continue the chain. Asked twice: its last job may just have ended."""
    for _ in range(2):
        if _may_have_jobs(run_dir):
            return False
        time.sleep(_POLL_SECONDS)
        if read_state(run_dir) != state:
            return False
    return True


def _may_have_jobs(run_dir: RunDir) -> bool:
    try:
        return bool(queued_jobs(run_dir))
    except SlurmSilent as error:
        log.warning("%s", error)
        return True
