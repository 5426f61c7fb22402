"""Tests on a real SLURM, skipped if there is none. All its nodes are on one machine, and share ``tmp_path``."""

from pathlib import Path
from typing import Any

import pytest
from support.toy_cluster import ToyDataset, ToyRun, cancel_all, make_profile, why_no_cluster
from support.toy_stage import ToyStage

from sharmill.engine.run_dir import RunDir
from sharmill.executors.slurm.profile import ClusterProfile


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_cluster()
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("slurm") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def make_run(tmp_path):
    """Return a function that makes a run over a toy stage of class ``kind`` and over the stages in ``later``.

    Its jobs are cancelled after the test.
    """
    folders = []

    def make(
        *,
        kind: type[ToyStage] = ToyStage,
        later: tuple[ToyStage, ...] = (),
        profile: ClusterProfile | None = None,
        folder: Path = tmp_path,
        **options: Any,
    ) -> ToyRun:
        folders.append(folder / "run")
        stage = kind(folder, lease_seconds=30.0, **options)
        return ToyRun(ToyDataset(stage, later), profile or make_profile())

    yield make
    for run_dir in folders:
        cancel_all(RunDir(run_dir))


@pytest.fixture
def make_config(write_config):
    """Return the function of ``write_config``; jobs of its datasets are cancelled after the test."""
    folders = []

    def make(folder: Path, **changes: Any) -> Path:
        folders.append(folder / "run")
        return write_config(folder, **changes)

    yield make
    for run_dir in folders:
        cancel_all(RunDir(run_dir))
