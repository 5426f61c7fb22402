"""The current folder may be an untrusted dataset: no process imports Python's own modules from it."""

import os
import subprocess
import sys

import pytest
from support.project import copy
from support.toy_cluster import ToyDataset, ToyRun
from support.toy_stage import ToyStage

from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.registry import ENCODERS

# Every new Python process of multiprocessing, submitit or sharmill itself imports each of these.
MODULES = ("multiprocessing", "selectors", "pickle", "signal", "json", "xxhash", "resource", "sharmill")


@pytest.fixture
def hostile(built, tmp_path):
    """A dataset beside modules that leave a file when they are imported."""
    dataset = copy(built.dataset, tmp_path / "dataset")
    for name in MODULES:
        (dataset / f"{name}.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    return dataset


# The arguments of Python, its environment variables, its exit status, and a word of its output.
PROCESSES = {
    # The checker reports the modules as stray files.
    "the checker and its workers": (["-P", "-m", "sharmill", "validate", ".", "--workers", "2"], {}, 3, "stray_file"),
    "the command as a module": (["-m", "sharmill", "--version"], {}, 0, "version"),
    "a job of submitit": (["-u", "-m", "submitit.core._submit", "none"], {"PYTHONSAFEPATH": "1"}, 1, ""),
}


@pytest.mark.parametrize(("arguments", "variables", "status", "said"), PROCESSES.values(), ids=PROCESSES.keys())
def test_processes_take_no_module_from_there(hostile, tmp_path, arguments, variables, status, said):
    if arguments[0] == "-m":
        (hostile / "sharmill.py").unlink()  # Python itself would import it
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=hostile, env=plain | variables, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout
    assert not (tmp_path / "ran").exists()


def test_a_slurm_job_sets_the_safe_path_before_python_starts(tmp_path):
    stage = ToyStage(tmp_path)
    script = ToyRun(ToyDataset(stage), ClusterProfile(setup=["module load sox"])).scripts(stage.in_run, 1)[0]
    assert script.index("export PYTHONSAFEPATH=1") < script.index("eval 'module load sox'") < script.index("srun")


def test_named_code_in_the_current_folder_replaces_nothing(tmp_path, monkeypatch):
    (tmp_path / "own_encoder_of_mine.py").write_text("class Encoder: pass\n")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('imported from the current folder')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert ENCODERS.load("python:own_encoder_of_mine:Encoder").__name__ == "Encoder"
    assert ENCODERS.load("python:colorsys:rgb_to_hsv")(0, 0, 0) == (0.0, 0.0, 0)
