"""SLURM's own commands: jobs in the queue, their end, and the limits of the cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tenacity import retry, retry_if_exception, stop_after_attempt, wait_fixed

from sharmill.errors import ConfigError, FatalError

_DEFAULT_MAX_ARRAY = 1001
_PAUSE_SECONDS = 5.0


class SlurmSilent(FatalError):
    """The controller does not answer; that says nothing about the jobs."""

    default_code: ClassVar[str] = "silent_cluster"


@dataclass(frozen=True)
class QueuedJob:
    """A job that is not over. ``id`` is that of the task where it belongs to an array (``12_3``)."""

    id: str
    state: str
    name: str

    @property
    def number(self) -> int:
        """Return the job's number, which it shares with the other tasks of its array. Later jobs have higher ones."""
        return int(self.id.split("_")[0])


def queued_jobs(folder: Path) -> list[QueuedJob]:
    """Return this user's jobs that are not over and whose scripts lie in ``folder``, without the one that asks.

    Found by the path of their scripts and not by noted numbers, so that a process that dies between submitting and
    noting hides none.

    Raises:
        ConfigError: there is no SLURM here.
        SlurmSilent: nobody answers.
    """
    shown = _ask(["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%T|%j|%o"])
    own = os.environ.get("SLURM_JOB_ID")
    jobs = []
    for line in shown.splitlines():
        job_id, state, rest = line.split("|", 2)
        # A name may hold a "|" as well; the path of submitit's scripts does not, unless the run directory does.
        name, found, script = rest.partition(f"|{folder}/")
        if found and "/" not in script and job_id != own:
            jobs.append(QueuedJob(job_id, state, name))
    return jobs


def cancel(job_ids: Sequence[str]) -> None:
    """Ask SLURM to end jobs; no error where it does not answer."""
    if job_ids:
        subprocess.run(["scancel", *job_ids], capture_output=True, check=False, timeout=60)


def max_array_size() -> int:
    """Return how many tasks the cluster allows in one array; SLURM's own default where there is no SLURM to ask.

    Raises:
        SlurmSilent: nobody answers.
    """
    if shutil.which("scontrol") is None:
        return _DEFAULT_MAX_ARRAY - 1
    shown = _ask(["scontrol", "show", "config"])
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", shown, re.MULTILINE)
    # The largest index is one less than MaxArraySize, and so is the largest number of tasks from index 0 on.
    return (int(match[1]) if match else _DEFAULT_MAX_ARRAY) - 1


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


def _ask(command: list[str]) -> str:
    try:
        return _output(command)
    except FileNotFoundError as error:
        message = f"there is no {command[0]} here; are you on a SLURM cluster?"
        raise ConfigError(message, code="no_cluster") from error
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise SlurmSilent(f"SLURM does not answer {command[0]}: {' '.join(said.split())}") from error


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, (OSError, subprocess.SubprocessError)) and not isinstance(error, FileNotFoundError)


@retry(stop=stop_after_attempt(3), wait=wait_fixed(_PAUSE_SECONDS), retry=retry_if_exception(_may_pass), reraise=True)
def _output(command: list[str]) -> str:
    """Return what a command prints. A controller that is busy, or being restarted, may not answer for a moment."""
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
