"""An executor of an installed package: nothing of sharmill names it or its keys."""

import os
import shlex
import sys

import pytest
from support.project import Project, install

from sharmill.config import load_config, to_yaml
from sharmill.engine.executor import Listener
from sharmill.engine.order import make_stages
from sharmill.engine.progress import read_progress
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Six recordings to be made a dataset of by an executor whose Python has an environment of its own."""
    install(monkeypatch, tmp_path / "site", "executor")
    command = ["env", "-i", f"PATH={os.environ['PATH']}", f"PYTHONPATH={os.pathsep.join(sys.path)}", sys.executable]
    python, project = tmp_path / "python", Project(tmp_path)
    python.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    python.chmod(0o755)
    project.add_voices([0.4] * 6)
    return project.configure(
        match=None, prepare={"min_duration": 0.0, "unit_records": 2}, write={"shard_size": 2}, encode={"codecs": []},
        executor={"kind": "apart", "python": str(python), "workers": 2},
    )  # fmt: skip


def test_supervisors_of_another_python_make_a_dataset(config):
    assert run_dataset(config, Listener()).ok
    assert len(list(open_shar(config.dataset_dir))) == 6
    found = {progress.rank for stage in make_stages(config) for progress in read_progress(stage.ranks.progress)}
    assert found >= {0, 1}


def test_its_keys_are_stored(config, tmp_path):
    (tmp_path / "stored.yaml").write_bytes(to_yaml(config))
    assert load_config(tmp_path / "stored.yaml") == config
