"""The current folder may be a stranger's dataset: no process takes Python's own modules from there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.paths import REPOSITORY
from support.shar import copy
from support.toy_cluster import ToyDataset, ToyRun
from support.toy_stage import ToyStage

from sharmill.errors import ConfigError
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.registry import ENCODERS

# Each is imported by every new Python process of multiprocessing, submitit or sharmill itself.
MODULES = ("multiprocessing", "selectors", "pickle", "signal", "json", "xxhash", "resource", "sharmill")


@pytest.fixture
def hostile(built, tmp_path):
    """A dataset with modules beside it that leave a file when they are imported."""
    dataset = copy(built.dataset, tmp_path / "dataset")
    for name in MODULES:
        (dataset / f"{name}.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    return dataset


def run_in(folder, *command, **environment):
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        command, cwd=folder, env=plain | environment, capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_modules_are_hostile(hostile, tmp_path):
    run_in(hostile, sys.executable, "-c", "import multiprocessing")
    assert (tmp_path / "ran").exists()


def test_the_checker_and_its_workers(hostile, tmp_path):
    status, said = run_in(hostile, sys.executable, "-P", "-m", "sharmill", "validate", ".", "--workers", "2")
    assert status == 3, said  # the modules are stray files
    assert "stray_file" in said
    assert not (tmp_path / "ran").exists()


def test_the_command_as_a_module(hostile, tmp_path):
    (hostile / "sharmill.py").unlink()  # Python itself would run it
    assert run_in(hostile, sys.executable, "-m", "sharmill", "--version")[0] == 0
    assert not (tmp_path / "ran").exists()


def test_a_job_of_slurm_exports_the_safe_path_before_python_starts(tmp_path):
    stage = ToyStage(tmp_path)
    script = ToyRun(ToyDataset(stage), ClusterProfile(setup=["module load sox"])).scripts(stage, 1)[0]
    assert script.index("export PYTHONSAFEPATH=1") < script.index("eval 'module load sox'") < script.index("srun")


def test_a_job_of_submitit_with_the_safe_path(hostile, tmp_path):
    command = [sys.executable, "-u", "-m", "submitit.core._submit", str(tmp_path / "none")]
    run_in(hostile, *command, PYTHONSAFEPATH="1")
    assert not (tmp_path / "ran").exists()


def python_files():
    folders = [REPOSITORY / name for name in ("src", "jobs", "pipelines")]
    return {path: path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")}


def test_every_process_is_started_with_the_safe_path():
    for path, text in python_files().items():
        if re.search(r"get_context\(|ProcessPoolExecutor\(|SpawnProcess\)", text):
            assert "with safe_path()" in text, path
        for call in re.findall(r"sys\.executable.{0,40}", text, re.DOTALL):
            assert re.match(r'sys\.executable,\s+"-P"', call), f"{path}: {call}"
        assert not re.search(r"os\.(exec|spawn|posix_spawn|system)|runpy", text), path


def test_every_script_of_a_job_exports_the_safe_path_before_python_looks_into_the_folder():
    """A script named by its path looks into its own folder; ``-c``, ``-m`` and ``-`` look into the current one."""
    scripts = {path: path.read_text() for path in (REPOSITORY / "jobs").rglob("*") if path.suffix in (".sbatch", ".sh")}
    assert len(scripts) > 3
    for path, text in scripts.items():
        found = re.search(r'^[^#\n]*(python|\$python)"? +(-c|-m|-) ', text, re.MULTILINE)
        if found is not None:
            assert 0 <= text.find("\nexport PYTHONSAFEPATH=1\n") < found.start(), path
    assert "-m sharmill.executors.ray_node" in scripts[REPOSITORY / "jobs/sbatch/ray.sbatch"]


def test_the_script_of_a_cluster_of_ray(hostile, tmp_path):
    """With a SLURM that knows one machine as two nodes, and starts nothing."""
    for name, line in {"scontrol": "echo NodeAddr=127.0.0.1 x", "srun": "exit 1", "scancel": "exit 0"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("socket", "secrets"):
        (hostile / f"{name}.py").write_text((hostile / "json.py").read_text())
    said = run_in(
        hostile, "bash", str(REPOSITORY / "jobs/sbatch/ray.sbatch"), "all", PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURMD_NODENAME="node", SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(hostile), SHARMILL_PYTHON=sys.executable,
        SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="node,other", SHARMILL_JOBS=str(REPOSITORY / "jobs"),
    )[1]  # fmt: skip
    assert "ended before the cluster was up" in said
    assert not (tmp_path / "ran").exists()


def test_code_that_the_user_names_is_found_in_the_current_folder_but_replaces_nothing(tmp_path, monkeypatch):
    (tmp_path / "own_encoder_of_mine.py").write_text("class Encoder: pass\n")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('imported from the current folder')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert ENCODERS.load("python:own_encoder_of_mine:Encoder").__name__ == "Encoder"
    assert ENCODERS.load("python:colorsys:rgb_to_hsv")(0, 0, 0) == (0.0, 0.0, 0)


def test_a_run_directory_of_two_lines_makes_no_script(tmp_path):
    with pytest.raises(ConfigError, match="control character"):
        ToyRun(ToyDataset(ToyStage(tmp_path / "a\n#SBATCH --wrap=x")), ClusterProfile())
