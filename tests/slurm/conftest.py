"""A real SLURM. The tests skip where there is none; ``tmp_path`` is on the only machine, so all nodes share it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.toy_cluster import SleepyStage, ToyChain, ToyDataset, cancel_all, make_profile

from sharmill.engine.rundir import RunDir
from sharmill.executors.slurm.profile import ClusterProfile


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("slurm") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str:
    if shutil.which("sbatch") is None:
        return "there is no SLURM here: sbatch is not installed"
    pinged = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, check=False, timeout=60)
    if pinged.returncode != 0 or "is UP" not in pinged.stdout:
        return f"SLURM's controller does not answer: {' '.join((pinged.stdout + pinged.stderr).split())}"
    shown = subprocess.run(["sinfo", "--noheader", "--format=%P"], capture_output=True, text=True, check=False)
    if not {"cpu*", "scavenge", "gpu"} <= set(shown.stdout.split()):
        return "this is not the test cluster: it lacks the partitions cpu, scavenge and gpu"
    return ""


@pytest.fixture
def make_chain(tmp_path):
    """Returns a function: options of the stage, ``profile`` -> a chain over a toy stage of class ``kind``, by default
    in the test's folder, and over those of ``later``. No job of it is left behind."""
    folders = []

    def make(
        *,
        kind: type[SleepyStage] = SleepyStage,
        later: tuple[SleepyStage, ...] = (),
        profile: ClusterProfile | None = None,
        folder: Path = tmp_path,
        **options: Any,
    ) -> ToyChain:
        folders.append(folder / "run")
        return ToyChain(ToyDataset(kind(folder, **options), later), profile or make_profile())

    yield make
    for run_dir in folders:
        cancel_all(RunDir(run_dir))


@pytest.fixture
def make_config(write_config):
    """The function of ``write_config``; the jobs of its datasets are ended with the test."""
    folders = []

    def make(folder: Path, **changes: Any) -> Path:
        folders.append(folder / "run")
        return write_config(folder, **changes)

    yield make
    for run_dir in folders:
        cancel_all(RunDir(run_dir))
