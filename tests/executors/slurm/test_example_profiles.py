"""The example profiles in configs/clusters, each loaded, and what becomes of it in the scripts of jobs."""

from __future__ import annotations

import re
import subprocess

import pytest
from support.paths import REPOSITORY
from support.toy_stage import ToyStage

from sharmill.engine.rundir import RunDir
from sharmill.executors.slurm.executor import SlurmExecutor
from sharmill.executors.slurm.profile import load_profile

EXAMPLES = sorted((REPOSITORY / "configs/clusters").glob("*.yaml"))


class MatchStage(ToyStage):
    kind = "match"
    uses_gpu = True


def do_nothing() -> None:
    pass


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Returns a function: name of an example -> the scripts of ranks on GPUs, of others, and of driver jobs."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)

    def make(name: str) -> list[str]:
        profile = load_profile(REPOSITORY / f"configs/clusters/{name}.yaml")
        executor = SlurmExecutor(profile, RunDir(tmp_path / "run"), do_nothing, do_nothing, "toy")
        cpu = ToyStage(tmp_path)
        return [executor.script(MatchStage(tmp_path), 2), executor.script(cpu, 2), executor.driver_script(
            cpu, behind_ranks=True)]  # fmt: skip

    return make


def options(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_makes_scripts_that_the_shell_can_read(path, scripts):
    for script in scripts(path.stem):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_preemptible_ranks_have_safe_driver_jobs(scripts):
    partitions = [options(script)["partition"] for script in scripts("preemptible")]
    assert partitions == ["gpu-scavenge", "cpu-scavenge", "cpu"]


def test_a_type_of_gpu_is_asked_for_by_gres_alone(scripts):
    ranks = options(scripts("gpu_types")[0])
    assert ranks["gres"] == "gpu:1g.10gb:1"
    assert "gpus-per-node" not in ranks


def test_apptainer_runs_the_python_of_ranks_and_not_of_driver_jobs(scripts):
    gpu, cpu, driver = scripts("apptainer")
    command = " apptainer exec --nv /images/sharmill.sif python -u -m submitit.core._submit "
    assert [command in script for script in (gpu, cpu, driver)] == [True, True, False]


def test_pyxis_gets_image_mounts_and_folder_of_ranks_and_not_of_driver_jobs(scripts, tmp_path):
    gpu, cpu, driver = scripts("pyxis")
    arguments = (
        "--container-image=/images/sharmill.sqsh --container-mounts=/data:/data,/runs:/runs "
        f"--container-workdir={tmp_path} python -u -m submitit.core._submit "
    )
    assert [arguments in script for script in (gpu, cpu, driver)] == [True, True, False]


def test_the_environment_of_conda_is_unpacked_once_on_each_node(tmp_path):
    """By a stand-in of tar; the second job finds it there, and one that is not whole is made again."""
    (line,) = load_profile(REPOSITORY / "configs/clusters/conda.yaml").setup
    tar = "tar() { echo unpacked >> calls; mkdir -p here-sharmill/bin; echo exit $FAILS > here-sharmill/bin/python; "
    tar += "chmod +x here-sharmill/bin/python; }"
    line = f"{tar}\n{line.replace('/tmp/$USER', 'here')}"
    ended = [
        subprocess.run(["bash", "-c", line], env={"PATH": "/usr/bin:/bin", "FAILS": fails}, cwd=tmp_path, check=False)
        for fails in ("3", "0", "0")
    ]
    assert [process.returncode for process in ended] == [3, 0, 0]
    assert (tmp_path / "calls").read_text().count("unpacked") == 2
