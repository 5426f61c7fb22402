"""Runs over a toy stage, and the cluster that they are on; importable in the cluster's jobs, which unpickle them."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sharmill.engine.executor import Listener, StageResult, Submitted
from sharmill.engine.launch import find_live
from sharmill.engine.plan import read_ledger
from sharmill.engine.run import locked, run_stage
from sharmill.engine.run_dir import RunDir, RunOutcome
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Totals, Unit
from sharmill.executors.slurm.executor import SlurmExecutor
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.queue import queued_jobs, scancel
from sharmill.pipeline import DatasetResult
from support.toy_stage import ToyStage, output_bytes, run as run_locally, wait_until

REPOSITORY = Path(__file__).parents[2]
# The cluster is not part of the repository; tests that need it are skipped if it is absent.
SHARED = REPOSITORY.parent / "shared"
KILL_NODE = SHARED / "slurm" / "kill_node.sh"
# Jobs import the modules of tests that define stages.
SETUP = [f"export PYTHONPATH={os.environ['PYTHONPATH']}:{REPOSITORY}", "export OMP_NUM_THREADS=1"]


class MortalStage(ToyStage):
    """End the driver jobs that finalize the stage, in the ways given by the marks ``ends``."""

    def finalize(self, run: StageRun) -> Totals:
        ends, ended = self.marked("ends"), self.marked("ended")
        if len(ended) < len(ends):
            how, job = ends[len(ended)], os.environ["SLURM_JOB_ID"]
            self.mark("ended", how)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how != "error":
                subprocess.run(["scancel", job] if how == "scancel" else ["scontrol", how, job], check=True)
                time.sleep(60)
            raise RuntimeError("nobody thought of this")
        return super().finalize(run)


class MiddleStage(ToyStage):
    """Comes behind another stage in the same run directory."""

    kind = "middle"

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.root, self.marks = folder / self.kind / "out", folder / self.kind / "marks"


@dataclass(frozen=True)
class ToyDataset:
    """A dataset of one toy stage, or of several, with ``later`` as the dependent stages."""

    stage: ToyStage
    later: tuple[ToyStage, ...] = ()
    name: str = "toy"

    @property
    def run_dir(self) -> Path:
        return self.stage.run_dir.path

    def make_stages(self) -> list[StageRun]:
        return [stage.in_run for stage in (self.stage, *self.later)]

    def run(self, executor: SlurmExecutor, *, restart: bool, wait_seconds: float) -> RunOutcome | Submitted:
        results: list[tuple[StageRun, StageResult]] = []
        with locked(self.stage.run_dir, wait_seconds) as lock:
            joins = bool(find_live(self.stage.dir, ranks=False))
            jobs = executor.find_jobs(executor.run_dir)
            if jobs is not None:
                executor.begin(executor.run_dir, executor.given, jobs, is_joining=joins)
            for stage in self.make_stages():
                result = run_stage(stage, executor, Listener(), restart=restart, unlocked=lock.released)
                results.append((stage, result))
                if result.submitted is not None:
                    return result.submitted
                if not result.ok:
                    break
        return DatasetResult(None, results).outcome()

    def ranks_of_use(self, stage: StageRun, units: Sequence[Unit]) -> int:
        return len(units)

    def show(self) -> None:
        """Shows nothing."""


@dataclass
class ToyRun(SlurmExecutor):
    @property
    def stage(self) -> ToyStage:
        assert isinstance(self.dataset, ToyDataset)
        return self.dataset.stage


def slurm(*command: Any) -> str:
    """Return the output of a SLURM command."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def why_no_cluster() -> str:
    """Return why tests that need the test cluster are skipped, or nothing."""
    if shutil.which("sbatch") is None:
        return "there is no SLURM here: sbatch is not installed"
    pinged = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, check=False, timeout=60)
    if pinged.returncode != 0 or "is UP" not in pinged.stdout:
        return f"SLURM's controller does not answer: {' '.join((pinged.stdout + pinged.stderr).split())}"
    shown = subprocess.run(["sinfo", "--noheader", "--format=%P"], capture_output=True, text=True, check=False)
    if not {"cpu*", "scavenge", "gpu"} <= set(shown.stdout.split()):
        return "this is not the test cluster: it lacks the partitions cpu, scavenge and gpu"
    return ""


def make_profile(**changes: Any) -> ClusterProfile:
    """Return a profile with four small ranks for stages of any size; further values are passed to the ranks."""
    cluster = {key: changes.pop(key) for key in list(changes) if key in ClusterProfile.__dataclass_fields__}
    ranks = RankProfile(**({"partition": "cpu", "max_ranks": 4, "memory_gb": 0.25, "timeout_min": 60} | changes))
    return ClusterProfile(
        **({"cpu": ranks, "gpu": replace(ranks), "signal_s": 30, "setup": SETUP, "driver_units": 0} | cluster)
    )


def cancel_all(run_dir: RunDir) -> None:
    """Ends the jobs of a run directory, and returns when they are gone."""
    scancel([job.id for job in queued_jobs(run_dir)])
    wait_until(lambda: not queued_jobs(run_dir))


def assert_same_as_local(run: ToyRun, folder: Path) -> None:
    """The output has the bytes of an undisturbed local run, every unit is in the ledger, and the accounts add up."""
    stage = run.stage
    reference = ToyStage(folder / "reference", units=stage.units)
    run_locally(reference)
    assert output_bytes(stage) == output_bytes(reference)
    units = stage.dir.read_units()
    assert sorted(read_ledger(stage.dir, units)) == list(range(stage.units))
    assert stage.dir.read_totals() == reference.dir.read_totals()


def running_ranks(run: ToyRun) -> list[str]:
    """The tasks of the ranks' array that run."""
    return [job.id for job in queued_jobs(run.run_dir) if job.state == "RUNNING" and "_" in job.id]


def wait_for_units(run: ToyRun, count: int, seconds: float = 90.0) -> None:
    """Returns when at least ``count`` units are in the ledger."""
    stage = run.stage
    wait_until(
        lambda: stage.dir.units.exists() and len(read_ledger(stage.dir, stage.dir.read_units())) >= count, seconds
    )
