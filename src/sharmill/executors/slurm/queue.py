"""Calls to SLURM's commands: list and cancel the queued jobs of a run directory, and query settings.

The jobs of a run directory are found by their comment, which contains the id of the run directory. They are therefore
found for every submitting user and every path of the directory, even if the submitting process was killed before it
recorded their ids.
"""

import logging
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar, Literal

from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_delay,
    wait_exponential,
)
from tenacity.retry import retry_base

from sharmill.engine.run_dir import RunDir
from sharmill.errors import ConfigError, FatalError, SharmillError

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
# Time, in seconds, within which cancelled jobs must have left the queue. SLURM kills a process that ignores SIGTERM
# after KillWait, 30 s by default.
SECONDS_TO_CANCEL = 180.0
# The role of a job: a rank, the driver job after the ranks, or the backup driver job, which runs only if the driver job
# fails.
Role = Literal["rank", "advance", "second"]


class SlurmSilent(FatalError):
    """The controller does not answer, or accepts no jobs at present; the state of the jobs is unknown."""

    default_code: ClassVar[str] = "silent_cluster"


@dataclass(frozen=True)
class QueuedJob:
    """A queued or running job.

    Attributes:
        id: the id of the job, or of the task of an array, such as ``12_3``.
        state, reason: the state of the job, and SLURM's reason for it.
        waits_for: its dependency, such as ``afterany:12_*``, "" if there is none.
        user: the user who submitted it.
        role: the role of the job in the run.
    """

    id: str
    state: str
    reason: str
    waits_for: str
    user: str
    role: str

    def __str__(self) -> str:
        return f"job {self.id} (user {self.user})"


def queued_jobs(
    run_dir: RunDir, patience: float = PATIENCE_SECONDS, *, on_any_cluster: bool = False
) -> list[QueuedJob]:
    """Return all users' unfinished jobs for a run directory, except the calling job.

    SLURM is not asked if no job was ever submitted from the run directory.

    Args:
        patience: seconds to keep trying if SLURM does not answer.
        on_any_cluster: do not raise an error if the run waits for jobs on another cluster.

    Raises:
        ConfigError: this machine has no SLURM, or the run waits for jobs on another cluster.
        SlurmSilent: SLURM does not answer.
    """
    if not run_dir.jobs.exists() or not (run_id := run_dir.read_id()):
        return []
    shown = ask(["squeue", "--noheader", "--all", "--array", "--format=%i|%T|%r|%E|%u|%k"], patience)
    # The comment may contain other text too, since a site may add to comments.
    ours = rf"^(\d+(?:_\d+)?)\|(\w+)\|([^|]*)\|([^|]*)\|([^|]*)\|.*\bsharmill:{run_id}:(\w+)"
    jobs = []
    for number, state, reason, waits_for, user, role in re.findall(ours, shown, re.MULTILINE):
        # A driver job that is completing has no work left, and a job with an impossible dependency never starts.
        is_over = role != "rank" and (state == "COMPLETING" or reason == "DependencyNeverSatisfied")
        if not is_over and number != os.environ.get("SLURM_JOB_ID"):
            waits_for = re.sub(r"\((null|unfulfilled)\)", "", waits_for)
            jobs.append(QueuedJob(number, state, reason, waits_for, user, role))
    given = run_dir.read_request()
    if jobs or on_any_cluster or given is None or not waits_for_jobs(run_dir):
        return jobs
    if (here := setting("ClusterName")) != given.cluster:
        raise ConfigError(
            f"the run waits for its jobs on the cluster {given.cluster}, but this machine belongs to "
            f"{here or 'no cluster'}: end the run there with sharmill cancel {run_dir.path}; if you know that no job "
            "is left there, continue here with sharmill submit --take-over or sharmill run --take-over",
            code="jobs_elsewhere",
        )
    return []


def waits_for_jobs(run_dir: RunDir) -> bool:
    """Return True if the run was submitted to a cluster and has not ended."""
    given = run_dir.read_request()
    return given is not None and given.cluster != "" and run_dir.read_outcome() is None


def describe_jobs(jobs: Sequence[QueuedJob]) -> str:
    """Return a short description of jobs: the first five ids, the number of further jobs, and the users' names."""
    named = ", ".join(job.id for job in jobs[:5])
    users = ", ".join(sorted({job.user for job in jobs}))
    return f"jobs {named}" + (f" and {len(jobs) - 5} more" if len(jobs) > 5 else "") + f" (user {users})"


def parent_ids(job_ids: Sequence[str]) -> list[str]:
    """Return the ids of the jobs and job arrays to which tasks belong, in order."""
    return sorted({job_id.split("_")[0] for job_id in job_ids}, key=int)


def scancel(job_ids: Sequence[str], *options: str) -> None:
    """Ask SLURM to cancel jobs; errors are ignored."""
    if job_ids:
        with suppress(OSError, subprocess.SubprocessError):
            _run(["scancel", *options, *job_ids])


def require_no_jobs(run_dir: RunDir, *, take_over: bool = False) -> None:
    """Raise ConfigError if jobs of a run directory are in the queue, or may be there because SLURM does not answer.

    With ``take_over``, SLURM need not answer, because the user has confirmed that no jobs are left.
    """
    try:
        jobs = queued_jobs(run_dir, on_any_cluster=take_over)
    except SharmillError as error:
        given, end = run_dir.read_request(), run_dir.read_outcome()
        # No jobs can be left if the last run was not submitted to SLURM, or was completed.
        if take_over or (given is not None and not given.cluster) or (end is not None and end.state == "done"):
            return
        raise ConfigError(
            f"jobs that were submitted from {run_dir.path} may still be running: {error}; run this command where "
            "squeue works, or, if you know that no job is left, use sharmill run --take-over",
            code=error.code,
        ) from error
    if jobs:
        raise ConfigError(
            f"{describe_jobs(jobs)} of this dataset are still in the queue; wait for them (sharmill status "
            f"{run_dir.path}) or end them: scancel {' '.join(parent_ids([job.id for job in jobs]))}",
            code="jobs_in_queue",
        )


def cancel_jobs(run_dir: RunDir) -> list[str]:
    """Cancel all jobs of a run directory, and return their ids once they have left the queue.

    The caller has recorded the end of the run, so that jobs submitted meanwhile do nothing, and has checked the id of
    the run directory with ``require_original``.

    Raises:
        ConfigError: this machine has no SLURM, or the jobs are on another cluster.
        SlurmSilent: SLURM does not answer.
        FatalError: jobs are still in the queue after three minutes.
    """
    ended: set[str] = set()
    deadline = time.monotonic() + SECONDS_TO_CANCEL
    while jobs := queued_jobs(run_dir):
        if time.monotonic() > deadline:
            raise FatalError(
                f"{describe_jobs(jobs)} are still in the queue {SECONDS_TO_CANCEL:.0f} s after scancel; check again "
                f"with sharmill status {run_dir.path}",
                code="jobs_in_queue",
            )
        numbers = parent_ids([job.id for job in jobs])
        ended.update(numbers)
        scancel(numbers)
        time.sleep(2.0)
    return sorted(ended, key=int)


def setting(name: str, patience: float = PATIENCE_SECONDS) -> str:
    """Return a value of SLURM's configuration; "" if it is not set, or this machine has no SLURM.

    Raises:
        SlurmSilent: SLURM does not answer.
    """
    try:
        shown = ask(["scontrol", "show", "config"], patience)
    except ConfigError:
        return ""
    match = re.search(rf"^{name}\s*=\s*(\S+)", shown, re.MULTILINE)
    return match[1] if match else ""


@contextmanager
def outside_own_job() -> Iterator[None]:
    """Hide the environment variables of this process's own job, which sbatch would take for options of new jobs.

    Outside of a job, these variables are the user's own settings and stay. SLURM_CONF always stays.
    """
    own: dict[str, str] = {}
    if "SLURM_JOB_ID" in os.environ:
        prefixes = ("SLURM_", "SBATCH_", "SRUN_")
        own = {name: value for name, value in os.environ.items() if name.startswith(prefixes) and name != "SLURM_CONF"}
    for name in own:
        del os.environ[name]
    try:
        yield
    finally:
        # The variables are needed again, for instance to requeue this job.
        os.environ.update(own)


def retrying(patience: float, retry: retry_base) -> Retrying:
    """Return a retry policy with growing intervals, which gives up after ``patience`` seconds in total."""
    # Limit the interval to an eighth of ``patience``, so that the total time hardly exceeds it.
    return Retrying(
        stop=stop_after_delay(patience), retry=retry,
        wait=wait_exponential(multiplier=_PAUSE_SECONDS, max=min(300.0, patience / 8)),
        before_sleep=before_sleep_log(log, logging.WARNING), reraise=True,
    )  # fmt: skip


def ask(command: list[str], patience: float) -> str:
    """Return the output of a SLURM command; the command is repeated if it fails.

    Raises:
        ConfigError: this machine has no such command.
        SlurmSilent: the command still fails after ``patience`` seconds.
    """
    failed = retry_if_exception_type((OSError, subprocess.SubprocessError))
    try:
        return retrying(patience, failed & retry_if_not_exception_type(FileNotFoundError))(_run, command)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{command[0]} was not found: run this command on a machine of a SLURM cluster", code="no_cluster"
        ) from error
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise SlurmSilent(f"SLURM does not answer {command[0]}: {' '.join(said.split())}") from error


def _run(command: Sequence[str]) -> str:
    # Drop the user's own settings of squeue, which might hide jobs of other users.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    return subprocess.run(
        # This timeout only ends commands that hang, and is independent of ``patience``.
        command, capture_output=True, check=True, timeout=60.0, env=environment, text=True,
        errors="replace",
    ).stdout  # fmt: skip
