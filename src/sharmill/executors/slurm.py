"""The SLURM executor, on submitit: one task of a job array is one rank.

It does not wait. It submits the ranks and, behind them, a continuation that runs the same stages again: what is missing
then is submitted anew, and what is complete is finalized. So no process has to live as long as the work does.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharmill.engine.attempts import Attempts
from sharmill.engine.balance import pack
from sharmill.engine.run import Listener
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.engine.worker import MAX_ATTEMPTS, UnitError
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.profile import ClusterProfile, RankProfile
from sharmill.executors.rank_task import RankTask

log = logging.getLogger(__name__)

_DEFAULT_MAX_ARRAY = 1001


class HandedOver(Exception):
    """The ranks of a stage are submitted, and a continuation behind them; this process has nothing left to do."""

    def __init__(self, stage: str, num_units: int, ranks: list[str], continuation: str) -> None:
        super().__init__(stage, num_units, ranks, continuation)
        self.stage = stage
        self.num_units = num_units
        self.ranks = ranks
        self.continuation = continuation

    def __str__(self) -> str:
        arrays = sorted({rank.split("_")[0] for rank in self.ranks}, key=int)
        return (
            f"{self.stage}: {self.num_units} units on {len(self.ranks)} ranks (job {', '.join(arrays)}), "
            f"continued by job {self.continuation}"
        )


@dataclass(frozen=True)
class SlurmExecutor:
    """Submits ranks. ``folder`` is on a file system that all nodes share; ``continuation`` is run after the ranks."""

    profile: ClusterProfile
    folder: Path
    continuation: Callable[[], Any]
    job_name: str

    def run(self, stage: Stage, units: Sequence[Unit], listener: Listener) -> dict[int, UnitError]:
        """The units that failed for good, once nothing else is left to do.

        Raises:
            HandedOver: there were units to do, and they are submitted.
            FatalError: ranks end without beginning a unit.
        """
        attempts = Attempts(stage.dir.attempts)
        left = [unit for unit in units if attempts.counts[unit.index] < MAX_ATTEMPTS]
        if not left:
            return {unit.index: _describe_failure(stage, unit, attempts) for unit in units}
        self._require_progress(stage, attempts)
        bins = [units for units in pack_units(left, self.profile.for_stage(stage.uses_gpu).max_ranks) if units]
        device = self.profile.for_stage(stage.uses_gpu).device
        tasks = [RankTask(stage, rank, [unit.index for unit in units], device) for rank, units in enumerate(bins)]
        ranks = self._submit_ranks(stage, tasks)
        continuation = self._submit_continuation(stage, ranks)
        raise HandedOver(stage.name, len(left), ranks, continuation)

    def script(self, stage: Stage, num_ranks: int) -> str:
        """The sbatch script of a stage's ranks, for ``--dry-run``."""
        executor = self._submitit(self._parameters(stage.name, self.profile.for_stage(stage.uses_gpu)))
        executor.parameters["map_count"] = num_ranks
        return executor._make_submission_file_text(executor._submitit_command_str, "dry-run")

    def _submit_ranks(self, stage: Stage, tasks: list[RankTask]) -> list[str]:
        profile = self.profile.for_stage(stage.uses_gpu)
        largest = max_array_size()
        jobs = []
        for start in range(0, len(tasks), largest):
            part = tasks[start : start + largest]
            share = max(1, self.profile.max_parallel * len(part) // len(tasks))
            parameters = self._parameters(stage.name, profile) | {"array_parallelism": share}
            executor = self._submitit(parameters)
            with executor.batch():
                jobs += [executor.submit(task) for task in part]
        return [job.job_id for job in jobs]

    def _submit_continuation(self, stage: Stage, ranks: list[str]) -> str:
        parents = sorted({rank.split("_")[0] for rank in ranks}, key=int)
        parameters = self._parameters(f"{stage.name}-next", self.profile.cpu)
        # afterany: whatever has become of the ranks, the ledger says what is left to do.
        parameters |= {"dependency": "afterany:" + ":".join(parents), "use_srun": False}
        return self._submitit(parameters).submit(self.continuation).job_id

    def _submitit(self, parameters: dict[str, Any]) -> Any:
        import submitit

        _forget_own_job()
        executor = submitit.SlurmExecutor(
            self.folder, max_num_timeout=self.profile.max_requeues, python=self.profile.python
        )
        executor.update_parameters(**parameters)
        return executor

    def _parameters(self, name: str, profile: RankProfile) -> dict[str, Any]:
        cluster = self.profile
        values: dict[str, Any] = {
            "job_name": f"{self.job_name}-{name.replace('/', '-')}",
            "partition": profile.partition,
            "account": cluster.account,
            "qos": cluster.qos,
            "cpus_per_task": profile.cores,
            "gpus_per_node": profile.gpus or None,
            "mem": f"{round(profile.memory_gb * 1024)}M",
            "time": profile.timeout_min,
            "signal_delay_s": cluster.signal_s,
            "setup": cluster.setup or None,
            "additional_parameters": {"requeue": True, **profile.extra},
            "srun_args": _container_arguments(cluster) or None,
        }
        return {key: value for key, value in values.items() if value is not None}

    def _require_progress(self, stage: Stage, attempts: Attempts) -> None:
        """Ranks that cannot start would otherwise be submitted for ever."""
        mark = stage.dir.rounds
        now = sum(attempts.counts.values())
        before = mark.read_text().split() if mark.exists() else []
        if len(before) >= MAX_ATTEMPTS and set(before[-MAX_ATTEMPTS:]) == {str(now)}:
            raise FatalError(
                f"{stage.name}: the ranks ended {MAX_ATTEMPTS} times without beginning a unit; "
                f"see the logs in {self.folder} and {stage.dir.logs}"
            )
        mark.write_text(" ".join([*before, str(now)]))


def pack_units(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """The units of each rank, balanced by cost; never more ranks than units."""
    ordered = list(units)
    # Units without cost would all be packed into one bin.
    costs = [max(unit.cost, 1e-3) for unit in ordered]
    return [[ordered[index] for index in part] for part in pack(costs, min(num_ranks, len(ordered)))]


def max_array_size() -> int:
    """How many tasks the cluster allows in one array."""
    try:
        shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"cannot ask SLURM for its configuration: {error}; are you on a SLURM cluster?") from error
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", shown.stdout, re.MULTILINE)
    # The largest index is one less than MaxArraySize, and so is the largest number of tasks from index 0 on.
    return (int(match[1]) if match else _DEFAULT_MAX_ARRAY) - 1


def active_jobs(job_ids: Sequence[str]) -> list[str]:
    """Those of the jobs that wait or run."""
    if not job_ids:
        return []
    parents = sorted({job.split("_")[0] for job in job_ids})
    shown = subprocess.run(
        ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T", "--jobs", ",".join(parents)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    # squeue fails for jobs that it has forgotten, which are over.
    lines = [line.split() for line in shown.stdout.splitlines()]
    over = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
    return [line[0] for line in lines if len(line) == 2 and line[1] not in over]


def _describe_failure(stage: Stage, unit: Unit, attempts: Attempts) -> UnitError:
    if unit.index in attempts.errors:
        return attempts.errors[unit.index]
    message = (
        f"its rank ended {attempts.counts[unit.index]} times in the middle of it (killed, out of memory, or the node "
        f"was lost); see {stage.dir.logs}"
    )
    return UnitError(unit.index, message, message)


def _container_arguments(cluster: ClusterProfile) -> list[str]:
    if cluster.container_image is None:
        return []
    mounts = [f"--container-mounts={','.join(cluster.container_mounts)}"] if cluster.container_mounts else []
    return [f"--container-image={cluster.container_image}", *mounts]


def _forget_own_job() -> None:
    """A job that submits jobs must not hand its own allocation on: sbatch takes such variables for options."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "SRUN_")):
            del os.environ[name]
