from __future__ import annotations

import os

import pytest
from support.cluster_scripts import Cluster

from sharmill.executors.slurm import queue as slurm_queue


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_queue, "_PAUSE_SECONDS", 0.01)
    return Cluster(folder)
