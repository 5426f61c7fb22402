"""SLURM's own commands: the jobs of a run directory in the queue, questions about them, and their cancellation.

The jobs of a run directory are found by their comment, which has the id of the run directory in it: whoever submitted
them, whatever path led there, and also if the submission died before it could tell their numbers.
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
# A process that takes no notice of SIGTERM is killed by SLURM after KillWait, which is 30 s by default.
SECONDS_TO_CANCEL = 180.0
# A rank, the advance job behind ranks, and the job behind that, which runs only if the advance job fails.
Role = Literal["rank", "advance", "second"]


class SlurmSilent(FatalError):
    """The controller does not answer, or takes no jobs at present; that says nothing about the jobs."""

    default_code: ClassVar[str] = "silent_cluster"


@dataclass(frozen=True)
class QueuedJob:
    """A job that is not over. ``id`` is that of the task where it belongs to an array (``12_3``).

    ``waits_for`` is its dependency, such as ``afterany:12_*``, or "".
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
    """Return the jobs of a run directory that are not over, of all users, without the one that asks.

    Where no job was ever submitted from the run directory, nobody is asked.

    Args:
        patience: how many seconds to go on asking where nobody answers.
        on_any_cluster: the run may wait for jobs on a cluster that is not the one here.

    Raises:
        ConfigError: there is no SLURM here, or the run waits for jobs on another cluster.
        SlurmSilent: nobody answers.
    """
    if not run_dir.jobs.exists() or not (run_id := run_dir.read_id()):
        return []
    shown = ask(["squeue", "--noheader", "--all", "--array", "--format=%i|%T|%r|%E|%u|%k"], patience)
    # A site may add to comments.
    ours = rf"^(\d+(?:_\d+)?)\|(\w+)\|([^|]*)\|([^|]*)\|([^|]*)\|.*\bsharmill:{run_id}:(\w+)"
    jobs = []
    for number, state, reason, waits_for, user, role in re.findall(ours, shown, re.MULTILINE):
        # A job without ranks that is completing does nothing any more, and one behind a job that is done never begins.
        is_over = role != "rank" and (state == "COMPLETING" or reason == "DependencyNeverSatisfied")
        if not is_over and number != os.environ.get("SLURM_JOB_ID"):
            waits_for = re.sub(r"\((null|unfulfilled)\)", "", waits_for)
            jobs.append(QueuedJob(number, state, reason, waits_for, user, role))
    given = run_dir.read_request()
    if jobs or on_any_cluster or given is None or not waits_for_jobs(run_dir):
        return jobs
    if (here := setting("ClusterName")) != given.cluster:
        raise ConfigError(
            f"the run waits for its jobs on the cluster {given.cluster}, and this one is {here or 'none'}: end it "
            f"there by sharmill cancel {run_dir.path}; if you know that no job is left there, sharmill submit or run "
            "--take-over goes on here",
            code="jobs_elsewhere",
        )
    return []


def waits_for_jobs(run_dir: RunDir) -> bool:
    """Return True if a run was submitted to a cluster, and has not ended."""
    given = run_dir.read_request()
    return given is not None and given.cluster != "" and run_dir.read_outcome() is None


def describe_jobs(jobs: Sequence[QueuedJob]) -> str:
    """Return a few words that name jobs, whatever their number."""
    named = ", ".join(job.id for job in jobs[:5])
    users = ", ".join(sorted({job.user for job in jobs}))
    return f"jobs {named}" + (f" and {len(jobs) - 5} more" if len(jobs) > 5 else "") + f" (user {users})"


def parent_ids(job_ids: Sequence[str]) -> list[str]:
    """Return the numbers of jobs and arrays to which tasks belong, in order."""
    return sorted({job_id.split("_")[0] for job_id in job_ids}, key=int)


def scancel(job_ids: Sequence[str], *options: str) -> None:
    """Ask SLURM to end jobs; no error where it does not answer."""
    if job_ids:
        with suppress(OSError, subprocess.SubprocessError):
            _run(["scancel", *options, *job_ids])


def require_no_jobs(run_dir: RunDir, *, take_over: bool = False) -> None:
    """Raise ConfigError if jobs of a run directory are in the queue, or may be there because nobody can be asked.

    With ``take_over`` nobody need be asked: the user says that there are none.
    """
    try:
        jobs = queued_jobs(run_dir, on_any_cluster=take_over)
    except SharmillError as error:
        given, end = run_dir.read_request(), run_dir.read_outcome()
        # The last run was none on SLURM, or has left no jobs.
        if take_over or (given is not None and not given.cluster) or (end is not None and end.state == "done"):
            return
        raise ConfigError(
            f"jobs that were submitted from {run_dir.path} may still be at work on it: {error}; ask where squeue "
            "answers, or, if you know that none is left: sharmill run --take-over",
            code=error.code,
        ) from error
    if jobs:
        raise ConfigError(
            f"{describe_jobs(jobs)} of this dataset are still in the queue; wait for them (sharmill status "
            f"{run_dir.path}) or end them: scancel {' '.join(parent_ids([job.id for job in jobs]))}",
            code="jobs_in_queue",
        )


def cancel_jobs(run_dir: RunDir) -> list[str]:
    """End all jobs of a run directory; return their numbers once the queue has none of them any more.

    The end of the run was noted before, so what they submit meanwhile does nothing more. They are found by the id, of
    which the caller has made sure by ``require_original``.

    Raises:
        ConfigError: there is no SLURM here to be asked, or the jobs are on another cluster.
        SlurmSilent: nobody answers.
        FatalError: jobs are still there after three minutes.
    """
    ended: set[str] = set()
    deadline = time.monotonic() + SECONDS_TO_CANCEL
    while jobs := queued_jobs(run_dir):
        if time.monotonic() > deadline:
            raise FatalError(
                f"{describe_jobs(jobs)} are still in the queue {SECONDS_TO_CANCEL:.0f} s after scancel; ask again with "
                f"sharmill status {run_dir.path}",
                code="jobs_in_queue",
            )
        numbers = parent_ids([job.id for job in jobs])
        ended.update(numbers)
        scancel(numbers)
        time.sleep(2.0)
    return sorted(ended, key=int)


def setting(name: str, patience: float = PATIENCE_SECONDS) -> str:
    """Return a value of SLURM's configuration, "" where it has none or there is no SLURM to ask.

    Raises:
        SlurmSilent: nobody answers.
    """
    try:
        shown = ask(["scontrol", "show", "config"], patience)
    except ConfigError:
        return ""
    match = re.search(rf"^{name}\s*=\s*(\S+)", shown, re.MULTILINE)
    return match[1] if match else ""


@contextmanager
def outside_own_job() -> Iterator[None]:
    """Hide the variables of the job that this process is in while it submits others: sbatch takes them for options.

    Outside of a job they are the user's own settings and stay, and where SLURM's configuration lies stays in any case.
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
        # Requeueing this job, if it has to leave, needs them.
        os.environ.update(own)


def retrying(patience: float, retry: retry_base) -> Retrying:
    """Return what tries again, at growing intervals, for ``patience`` seconds: a controller may be away for hours."""
    # A user who asks should not wait much longer.
    return Retrying(
        stop=stop_after_delay(patience), retry=retry,
        wait=wait_exponential(multiplier=_PAUSE_SECONDS, max=min(300.0, patience / 8)),
        before_sleep=before_sleep_log(log, logging.WARNING), reraise=True,
    )  # fmt: skip


def ask(command: list[str], patience: float) -> str:
    """Return what a command of SLURM prints, which is run again where it fails.

    Raises:
        ConfigError: there is no such command here.
        SlurmSilent: it still fails after ``patience`` seconds.
    """
    failed = retry_if_exception_type((OSError, subprocess.SubprocessError))
    try:
        return retrying(patience, failed & retry_if_not_exception_type(FileNotFoundError))(_run, command)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {command[0]} here; are you on a SLURM cluster?", code="no_cluster") from error
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise SlurmSilent(f"SLURM does not answer {command[0]}: {' '.join(said.split())}") from error


def _run(command: Sequence[str]) -> str:
    # The user's own settings of squeue would hide jobs of others.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    return subprocess.run(
        # A command that hangs; however short the patience is, one that answers is heard.
        command, capture_output=True, check=True, timeout=60.0, env=environment, text=True,
        errors="replace",
    ).stdout  # fmt: skip
