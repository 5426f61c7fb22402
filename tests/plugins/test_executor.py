"""An executor of an installed package: nothing of sharmill names it or its keys."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from plugins.test_codec import install
from support.errors import raises
from support.shar import Project, voice

from sharmill.cli.main import main
from sharmill.config import load_config, to_yaml
from sharmill.engine.listener import Listener
from sharmill.engine.progress import read_progress
from sharmill.errors import ConfigError
from sharmill.executors.machine import examine_machine
from sharmill.pipeline import make_stages, run_dataset
from sharmill.shar import open_shar


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Six recordings to be made a dataset of by an executor whose Python has an environment of its own."""
    for folder in (tmp_path / "site", Path(__file__).parent / "executor"):
        monkeypatch.syspath_prepend(str(folder))
    install(tmp_path / "site", "apart", "1.0", "[sharmill.executors]\napart = apart:ApartExecutor\n")
    python = tmp_path / "python"
    command = ["env", "-i", f"PATH={os.environ['PATH']}", f"PYTHONPATH={os.pathsep.join(sys.path)}", sys.executable]
    python.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    python.chmod(0o755)
    project = Project(tmp_path)
    for number in range(6):
        project.add(f"{number}.flac", voice(0.4, seed=number))
    yield project.configure(
        match=None, prepare={"min_duration": 0.0, "unit_records": 2}, write={"shard_size": 2}, encode={"codecs": []},
        executor={"kind": "apart", "python": str(python), "workers": 2},
    )  # fmt: skip
    sys.modules.pop("apart", None)


def test_supervisors_of_another_python_make_a_dataset(config, capsys):
    assert run_dataset(config, Listener()).ok
    assert len(list(open_shar(config.dataset_dir))) == 6
    found = {progress.rank for stage in make_stages(config) for progress in read_progress(stage.dir.progress)}
    assert found >= {0, 1}
    with pytest.raises(SystemExit, match="0"):
        main(["status", config.run_dir])
    assert "write" in capsys.readouterr().out


def test_its_keys_are_checked_and_stored(config, tmp_path):
    path = tmp_path / "stored.yaml"
    path.write_bytes(to_yaml(config))
    assert load_config(path) == config
    for override, code, names in (
        ("executor.pyhton=x", "unknown_key", ["'executor.pyhton'", "'python'"]),
        ("executor.workers=0", "bad_config_value", ["executor: workers"]),
    ):
        with raises(ConfigError, code, *names):
            load_config(path, [override])


def test_the_state_of_a_machine_is_told_beside_an_executor_that_cannot_be_imported(config, tmp_path):
    install(tmp_path / "site", "broken", "1.0", "[sharmill.executors]\nbroken = no_such_module:Executor\n")
    found = {check.name: check for check in examine_machine(tmp_path)}
    assert "no_such_module" in found["executor broken"].to_do
    assert "Ray" in found
