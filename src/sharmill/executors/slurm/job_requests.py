"""Requests for the jobs of a dataset: what sbatch is told of ranks, driver jobs and watcher jobs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tenacity import retry_if_exception_message, retry_if_exception_type

from sharmill.config.loading import check_one_line
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.errors import FatalError
from sharmill.executors.slurm import scheduler
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.queue import (
    PATIENCE_SECONDS,
    Role,
    job_comment,
    max_array_size,
    parent_ids,
    retrying,
    scancel,
)
from sharmill.executors.slurm.setup_lines import checked_lines
from sharmill.storage import make_private_folder

log = logging.getLogger(__name__)

# A busy controller, or a limit on jobs in the queue; anything else that sbatch says is about what was asked for.
_MAY_PASS = re.compile(
    r".*(timed out|temporarily|unable to contact|connection|communicat|(?:Max|Grp)Submit\w*Limit)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class JobRequests:
    """Makes and submits the jobs of a dataset. All nodes share the file system of ``run_dir``.

    ``watcher_setup`` are shell lines that begin the watcher job, and ``patience`` is how many seconds to go on trying
    where SLURM does not answer or takes no more jobs. Both ``driver_job`` and ``watcher_job`` are called with the name
    of their stage and the token of its plan, if that is known; ``had_ranks`` is false where none have run before them.
    """

    profile: ClusterProfile
    run_dir: RunDir
    driver_job: Callable[..., Any]
    watcher_job: Callable[..., Any]
    job_name: str
    watcher_setup: tuple[str, ...] = ()
    patience: float = PATIENCE_SECONDS

    def __post_init__(self) -> None:
        # It is in lines of the sbatch script.
        check_one_line(str(self.run_dir.path.absolute()), "the path of the run directory")

    def arrays(self, stage: Stage, num_ranks: int) -> list[tuple[range, int]]:
        """Return the ranks of each job array, as large as the cluster allows, and how many of them may run at once."""
        largest = self.max_array_size
        ranges = [range(start, min(start + largest, num_ranks)) for start in range(0, num_ranks, largest)]
        return [(ranks, max(1, self.max_parallel(stage) * len(ranks) // num_ranks)) for ranks in ranges]

    @cached_property
    def max_array_size(self) -> int:
        """The number of tasks that the cluster allows in one array; SLURM is asked once."""
        return max_array_size(self.patience)

    def ranks_of(self, stage: Stage) -> RankProfile:
        """Return the profile of a stage's ranks."""
        return self.profile.for_stage(stage.name, stage.uses_gpu)

    def max_parallel(self, stage: Stage) -> int:
        """Return how many ranks of a stage may run at once."""
        parallel = self.ranks_of(stage).max_parallel or self.profile.max_parallel
        return min(parallel, self.profile.max_parallel_all or parallel)

    def told(self, stage: Stage | None, *, had_ranks: bool) -> dict[str, Any]:
        """Return what the driver job of a stage is called with."""
        if stage is not None and (token := stage.token or stage.dir.read_token()):
            return {"stage": stage.name, "token": token, "had_ranks": had_ranks}
        return {}

    def watcher_parameters(self, name: str, driver_job: str) -> dict[str, Any]:
        """Return the parameters of the watcher job behind a driver job."""
        watcher = self.driver_parameters(name, "watcher", f"afternotok:{driver_job}")
        watcher["additional_parameters"]["kill-on-invalid-dep"] = "yes"
        watcher["setup"] = [*self.watcher_setup, *watcher.get("setup", [])]
        return watcher

    def driver_parameters(self, name: str, role: Role, dependency: str | None) -> dict[str, Any]:
        """Return the parameters of a driver job; behind ranks ``afterany``, for the ledger says what is left to do."""
        parameters = self.parameters(f"{name}-{role}", role, self.profile.for_stage("driver", False))
        # It submits jobs, so it runs outside of a container, with the interpreter that runs here.
        parameters.pop("srun_args", None)
        return parameters | {"use_srun": False} | ({"dependency": dependency} if dependency else {})

    def submit(self, parameters: dict[str, Any], python: str | None, tasks: Sequence[Callable[[], Any]]) -> list[str]:
        """Submit one job, or one array, and return the numbers of its tasks."""
        failed_job_error = scheduler.failed_job_error()
        # If sbatch gives up waiting and the job is there nevertheless, it does no harm: its tasks end because they find
        # nothing to run, or do the same units as others.
        may_pass = retry_if_exception_type(failed_job_error) & retry_if_exception_message(match=_MAY_PASS)
        try:
            return retrying(self.patience, may_pass)(self._try_to_submit, parameters, python, tasks)
        except failed_job_error as error:
            message = f"SLURM refuses the jobs: {' '.join(str(error).split())}"
            raise FatalError(message, code="jobs_refused") from error

    def _try_to_submit(
        self, parameters: dict[str, Any], python: str | None, tasks: Sequence[Callable[[], Any]]
    ) -> list[str]:
        """Submit the tasks, without a second attempt.

        Raises:
            submitit's FailedJobError: SLURM does not take it, or does not say that it has.
        """
        # The pickled tasks have the configuration with all that the environment gave it.
        make_private_folder(self.run_dir.jobs)
        return scheduler.submit(self.request(parameters, python), tasks)

    def request(self, parameters: dict[str, Any], python: str | None) -> scheduler.JobRequest:
        """Return a job of this run directory as it is handed over."""
        return scheduler.JobRequest(self.run_dir.jobs, parameters, python, self.profile.max_requeues)

    def parameters(self, name: str, role: Role, profile: RankProfile) -> dict[str, Any]:
        """Return the parameters of a job, as submitit has them."""
        cluster = self.profile
        comment = " ".join([*filter(None, [profile.extra.get("comment")]), job_comment(self.run_dir, role)])
        values: dict[str, Any] = {
            "job_name": f"{self.job_name}-{name.replace('/', '-')}",
            "partition": profile.partition,
            "account": profile.account or cluster.account,
            "qos": profile.qos or cluster.qos,
            "cpus_per_task": profile.cores,
            "gpus_per_node": profile.gpus or None,
            "mem": f"{round(profile.memory_gb * 1024)}M",
            "time": profile.timeout_min,
            "signal_delay_s": cluster.signal_s,
            # The folder that jobs begin in is not the first place to look for Python's own modules.
            "setup": ["export PYTHONSAFEPATH=1", *checked_lines(cluster.setup)],
            "additional_parameters": {"requeue": True, **profile.extra, "comment": comment},
            # From SLURM 22.05 on srun does not take over the cores of sbatch.
            "srun_args": [f"--cpus-per-task={profile.cores}", *_container_arguments(cluster)],
        }
        return {key: value for key, value in values.items() if value is not None}


@contextmanager
def cancelled_on_error(jobs: list[str]) -> Iterator[None]:
    """Cancel jobs if those behind them cannot be submitted: without a driver job nothing would come of their work."""
    try:
        yield
    except BaseException:
        scancel(parent_ids(jobs))
        raise


def _container_arguments(cluster: ClusterProfile) -> list[str]:
    if cluster.container_image is None:
        return []
    mounts = [f"--container-mounts={','.join(cluster.container_mounts)}"] if cluster.container_mounts else []
    # Relative paths of the configuration are relative to this folder.
    return [f"--container-image={cluster.container_image}", *mounts, f"--container-workdir={Path.cwd()}"]
