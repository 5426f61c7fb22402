"""SLURM as it is reached from here: its commands, and submitit, which writes the scripts of jobs and submits them.

All that this program asks of a cluster goes through these functions, called through the module as ``scheduler.run``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from sharmill.errors import ConfigError


@dataclass(frozen=True)
class JobRequest:
    """The request for a job, or for an array of as many as it is submitted with.

    Attributes:
        folder: where its script, its input and its output are put.
        parameters: as submitit has them.
        python: the interpreter; by default this one.
        max_requeues: how often it may be requeued for its time limit.
    """

    folder: Path
    parameters: dict[str, Any]
    python: str | None
    max_requeues: int


def is_here(command: str) -> bool:
    """Return True if there is such a command on this machine."""
    return shutil.which(command) is not None


def run(command: Sequence[str], timeout: float) -> str:
    """Return what a command of SLURM prints.

    Raises:
        FileNotFoundError: there is no such command here.
        OSError, subprocess.SubprocessError: it cannot be run, fails, or does not end within ``timeout`` seconds.
    """
    # The user's own settings of squeue would hide jobs of others.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    return subprocess.run(
        command, capture_output=True, check=True, timeout=timeout, env=environment, text=True, errors="replace"
    ).stdout


def submit(request: JobRequest, tasks: Sequence[Callable[[], Any]]) -> list[str]:
    """Submit one job, or one array, and return the numbers of its tasks.

    Raises:
        submitit's FailedJobError: SLURM does not take it, or does not say that it has.
    """
    executor = _executor(request)
    # What submitit prints of sbatch's message the error has as well.
    with redirect_stderr(StringIO()), executor.batch():
        jobs = [executor.submit(task) for task in tasks]
    return [job.job_id for job in jobs]


def script(request: JobRequest, num_tasks: int | None = None) -> str:
    """Return the script of a job, or of an array of so many, to be shown."""
    executor = _executor(request)
    if num_tasks is not None:
        executor.parameters["map_count"] = num_tasks
    return str(executor._make_submission_file_text(executor._submitit_command_str, "dry-run"))


def failed_job_error() -> type[Exception]:
    """Return the class of what ``submit`` raises."""
    error: type[Exception] = _import_submitit().core.utils.FailedJobError
    return error


def _executor(request: JobRequest) -> Any:
    class Submitter(_import_submitit().SlurmExecutor):  # type: ignore[misc]
        """Submitit's class without its demand for srun, so that scripts can be shown on machines without SLURM."""

        @classmethod
        def affinity(cls) -> int:
            return 1

    executor = Submitter(request.folder, max_num_timeout=request.max_requeues, python=request.python)
    executor.update_parameters(**request.parameters)
    return executor


def _import_submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        message = "submitit is not installed: pip install 'sharmill[slurm]'"
        raise ConfigError(message, code="missing_package") from error
    return submitit
