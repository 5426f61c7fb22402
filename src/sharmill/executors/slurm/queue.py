"""SLURM's own commands: the jobs of a run directory in the queue, their end, and the limits of the cluster.

The jobs of a run directory are found by their comment, which has the id of the run directory in it: whoever submitted
them, whatever path led there, and also if the submission died before it could note their numbers.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar, Literal

from tenacity import RetryCallState, Retrying, before_sleep_log, retry_if_exception, wait_exponential
from tenacity.retry import retry_base

from sharmill.engine.rundir import RunDir
from sharmill.engine.stored import read_stored
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.slurm import scheduler
from sharmill.storage import write_atomic

log = logging.getLogger(__name__)

_DEFAULT_MAX_ARRAY = 1001
_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 300.0
# A command that hangs; however short the patience is, one that answers is heard.
_SECONDS_TO_ANSWER = 60.0
PATIENCE_SECONDS = 30.0
_RUN_ID = re.compile(r"[0-9a-f]{16}")

Role = Literal["rank", "driver", "watcher"]


class SlurmSilent(FatalError):
    """The controller does not answer; that says nothing about the jobs."""

    default_code: ClassVar[str] = "silent_cluster"


@dataclass(frozen=True)
class QueuedJob:
    """A job that is not over. ``id`` is that of the task where it belongs to an array (``12_3``)."""

    id: str
    state: str
    reason: str
    user: str
    role: str

    @property
    def number(self) -> int:
        """Return the job's number, which it shares with the other tasks of its array. Later jobs have higher ones."""
        return int(self.id.split("_")[0])


def require_slurm() -> None:
    """Raise ConfigError where jobs cannot be submitted."""
    if not scheduler.is_here("sbatch"):
        raise ConfigError("there is no sbatch here; are you on a SLURM cluster?", code="no_cluster")


def make_run_id(run_dir: RunDir) -> None:
    """Give a run directory its id, unless it has one. The caller holds the run directory's lock."""
    if not run_dir.id.exists():
        write_atomic(run_dir.id, secrets.token_hex(8).encode())


def job_comment(run_dir: RunDir, role: Role) -> str:
    """Return the comment by which the jobs of a run directory are found."""
    # Without an id, scripts are only shown.
    run_id = _run_id(run_dir) if run_dir.id.exists() else "new"
    return f"sharmill:{run_id}:{role}"


def _run_id(run_dir: RunDir) -> str:
    found = read_stored(run_dir.id).decode("ascii", "replace")
    if not _RUN_ID.fullmatch(found):
        raise ConfigError(
            f"{run_dir.id} is not the id of a run directory, by which its jobs are found: look for them with squeue, "
            "and remove the file once there are none",
            code="damaged_run_dir",
        )
    return found


def queued_jobs(run_dir: RunDir, patience: float = PATIENCE_SECONDS) -> list[QueuedJob]:
    """Return the jobs of a run directory that are not over, of all users, without the one that asks.

    Where no job was ever submitted from the run directory, nobody is asked.

    Args:
        patience: how many seconds to go on asking where nobody answers.

    Raises:
        ConfigError: there is no SLURM here.
        SlurmSilent: nobody answers.
    """
    return [job for job in _find_jobs(run_dir, patience) if job.id != os.environ.get("SLURM_JOB_ID")]


def competing_jobs(run_dir: RunDir, patience: float = PATIENCE_SECONDS) -> list[QueuedJob]:
    """Return the jobs of a run directory beside which this process must submit none.

    For a driver job these are ranks and later driver jobs: those before it have only not quite ended.
    """
    own_id = os.environ.get("SLURM_JOB_ID")
    found = _find_jobs(run_dir, patience)
    own = [job for job in found if job.id == own_id]
    if not own:
        return found
    return [job for job in found if job.role == "rank" or (job.role == "driver" and job.number > own[0].number)]


def _find_jobs(run_dir: RunDir, patience: float) -> list[QueuedJob]:
    if not run_dir.id.exists():
        return []
    shown = _ask(["squeue", "--noheader", "--all", "--array", "--format=%i|%T|%r|%u|%k"], patience)
    # A site may add to comments.
    ours = rf"^(\d+(?:_\d+)?)\|(\w+)\|([^|]*)\|([^|]*)\|.*\bsharmill:{_run_id(run_dir)}:(\w+)"
    found = [QueuedJob(*columns) for columns in re.findall(ours, shown, re.MULTILINE)]
    # A driver job that is completing does nothing any more, and a watcher job whose driver job is done never begins.
    # This process itself may be told to end, which takes a while.
    own = os.environ.get("SLURM_JOB_ID")
    return [
        job
        for job in found
        if job.role == "rank"
        or job.id == own
        or (job.state != "COMPLETING" and job.reason != "DependencyNeverSatisfied")
    ]


def describe_jobs(jobs: Sequence[QueuedJob]) -> str:
    """Return a few words that name jobs, whatever their number."""
    named = ", ".join(job.id for job in jobs[:5])
    users = ", ".join(sorted({job.user for job in jobs}))
    return f"jobs {named}" + (f" and {len(jobs) - 5} more" if len(jobs) > 5 else "") + f" (user {users})"


def parent_ids(job_ids: Sequence[str]) -> list[str]:
    """Return the numbers of jobs and arrays to which tasks belong, in order."""
    return sorted({job_id.split("_")[0] for job_id in job_ids}, key=int)


def scancel(job_ids: Sequence[str]) -> None:
    """Ask SLURM to end jobs; no error where it does not answer."""
    if job_ids:
        with suppress(OSError, subprocess.SubprocessError):
            scheduler.run(["scancel", *job_ids], timeout=_SECONDS_TO_ANSWER)


def requeue(job_id: str, patience: float = PATIENCE_SECONDS) -> bool:
    """Ask SLURM to end a job and to put it back into the queue; return False where it does not take the order."""
    try:
        _ask(["scontrol", "requeue", job_id], patience)
    except (SlurmSilent, ConfigError) as error:
        log.warning("job %s cannot be requeued: %s", job_id, error)
        return False
    return True


def cancel_pending(job_id: str) -> None:
    """Ask SLURM to end the tasks of an array that have not begun; no error where it does not answer."""
    with suppress(OSError, subprocess.SubprocessError):
        scheduler.run(["scancel", "--state=PENDING", job_id], timeout=_SECONDS_TO_ANSWER)


def max_array_size(patience: float = PATIENCE_SECONDS) -> int:
    """Return how many tasks the cluster allows in one array; SLURM's own default where there is no SLURM to ask.

    Raises:
        SlurmSilent: nobody answers.
    """
    found = _setting("MaxArraySize", patience)
    # The largest index is one less than MaxArraySize, and so is the largest number of tasks from index 0 on.
    return (int(found) if found.isdecimal() else _DEFAULT_MAX_ARRAY) - 1


def cluster_name(patience: float = PATIENCE_SECONDS) -> str:
    """Return the name of the cluster, "" where there is none.

    Raises:
        SlurmSilent: nobody answers.
    """
    return _setting("ClusterName", patience)


def _setting(name: str, patience: float) -> str:
    """Return a value of SLURM's configuration, "" where it has none or there is no SLURM to ask."""
    if not scheduler.is_here("scontrol"):
        return ""
    match = re.search(rf"^{name}\s*=\s*(\S+)", _ask(["scontrol", "show", "config"], patience), re.MULTILINE)
    return match[1] if match else ""


@contextmanager
def outside_own_job() -> Iterator[None]:
    """Hide the variables of the job that this process is in while it submits others: sbatch takes them for options.

    Outside of a job they are the user's own settings and stay, and where SLURM's configuration lies stays in any case.
    """
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
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
    deadline = time.monotonic() + patience

    def is_over(state: RetryCallState) -> bool:
        return time.monotonic() >= deadline

    def pause(state: RetryCallState) -> float:
        # The last attempt is at the end, so that who asks has waited as long as it was to.
        return max(0.0, min(pauses(state), deadline - time.monotonic()))

    pauses = wait_exponential(multiplier=_PAUSE_SECONDS, max=_LONGEST_PAUSE_SECONDS)
    warn = before_sleep_log(log, logging.WARNING)
    return Retrying(stop=is_over, wait=pause, retry=retry, before_sleep=warn, reraise=True, sleep=time.sleep)


def _ask(command: list[str], patience: float) -> str:
    """Return what a command prints."""
    try:
        return retrying(patience, retry_if_exception(_may_pass))(scheduler.run, command, _SECONDS_TO_ANSWER)
    except FileNotFoundError as error:
        message = f"there is no {command[0]} here; are you on a SLURM cluster?"
        raise ConfigError(message, code="no_cluster") from error
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise SlurmSilent(f"SLURM does not answer {command[0]}: {' '.join(said.split())}") from error


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, (OSError, subprocess.SubprocessError)) and not isinstance(error, FileNotFoundError)
