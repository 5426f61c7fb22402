"""`sharmill submit --dry-run`: every dataset is shown or named, whatever the others are like."""

from __future__ import annotations

import signal

import pytest
from support.shar import Project, voice

from sharmill.cli.main import main
from sharmill.config import to_yaml
from sharmill.engine.listener import Listener
from sharmill.executors.local.executor import LocalExecutor
from sharmill.pipeline import run_dataset


@pytest.fixture(autouse=True)
def _own_signals():
    """``main`` sets the handler of SIGTERM for its process, which here is that of the tests."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch, tmp_path):
    """Without commands of SLURM, which would be asked for the limits of the cluster."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def make_config(tmp_path):
    """Returns a function: name -> a project with two records, and the path of its configuration."""

    def make(name: str):
        folder = tmp_path / name
        folder.mkdir()
        project = Project(folder)
        for number in range(2):
            project.add(f"{number}.wav", voice(0.2, seed=number), speaker="s")
        config = project.configure(match=None)
        path = folder / "config.yaml"
        path.write_bytes(to_yaml(config))
        return config, path

    return make


def show(capsys, *paths, stage="prepare") -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["submit", stage, *map(str, paths), "--dry-run"])
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_the_scripts_of_the_ranks_and_of_the_job_behind_them_are_shown(make_config, capsys):
    status, out, _ = show(capsys, make_config("a")[1])
    assert status == 0
    assert out.count("#!/bin/bash") == 2
    assert "#SBATCH --dependency=afterany:RANKS" in out


def test_one_that_is_bad_hides_no_other(make_config, capsys):
    (bad, path), (_, good) = make_config("a"), make_config("b")
    (bad_root := type(path)(bad.sources[0].audio_root)).rename(bad_root.with_name("moved"))
    status, out, err = show(capsys, path, good)
    assert status == 2
    assert "audio_root" in err
    assert out.count("#!/bin/bash") == 2


def test_one_that_is_finished_is_named(make_config, capsys):
    config, path = make_config("a")
    assert run_dataset(config, Listener(), stages=["prepare"], executor=LocalExecutor(1)).ok
    status, out, _ = show(capsys, path)
    assert (status, out.split(": ")[-1]) == (0, "no unit is left to be submitted\n")
