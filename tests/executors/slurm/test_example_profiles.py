"""The example profiles in configs/clusters, each loaded, and what becomes of it in the scripts of jobs."""

from __future__ import annotations

import re
import subprocess

import pytest
from support.paths import REPOSITORY
from support.toy_cluster import ToyDataset, ToyRun
from support.toy_stage import ToyStage

from sharmill.executors.slurm.profile import load_profile

EXAMPLES = sorted((REPOSITORY / "configs/clusters").glob("*.yaml"))


class MatchStage(ToyStage):
    kind = "match"
    resource = "gpu"


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Returns a function: name of an example -> the scripts of ranks on GPUs, of others, and of advance jobs."""
    monkeypatch.chdir(tmp_path)

    def make(name: str) -> list[str]:
        profile = load_profile(REPOSITORY / f"configs/clusters/{name}.yaml")
        stage = ToyStage(tmp_path)
        run = ToyRun(ToyDataset(stage), profile)
        return [run.scripts(MatchStage(tmp_path), 2)[0], *run.scripts(stage, 2)[:2]]

    return make


def options(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_makes_scripts_that_the_shell_can_read(path, scripts):
    for script in scripts(path.stem):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_preemptible_ranks_have_safe_advance_jobs(scripts):
    partitions = [options(script)["partition"] for script in scripts("preemptible")]
    assert partitions == ["gpu-scavenge", "cpu-scavenge", "cpu"]


def test_a_type_of_gpu_is_asked_for_by_gres_alone(scripts):
    ranks = options(scripts("gpu_types")[0])
    assert ranks["gres"] == "gpu:1g.10gb:1"
    assert "gpus-per-node" not in ranks


def test_apptainer_runs_the_python_of_ranks_and_not_of_advance_jobs(scripts):
    gpu, cpu, advance = scripts("apptainer")
    command = " apptainer exec --nv /images/sharmill.sif python -u -m submitit.core._submit "
    assert [command in script for script in (gpu, cpu, advance)] == [True, True, False]


def test_pyxis_gets_image_mounts_and_folder_of_ranks_and_not_of_advance_jobs(scripts, tmp_path):
    gpu, cpu, advance = scripts("pyxis")
    arguments = (
        f"--container-image=/images/sharmill.sqsh --container-workdir={tmp_path} "
        "--container-mounts=/data:/data,/runs:/runs python -u -m submitit.core._submit "
    )
    assert [arguments in script for script in (gpu, cpu, advance)] == [True, True, False]


@pytest.fixture
def unpack(tmp_path):
    """Returns a function that runs the setup line of conda with a stand-in of tar, and returns status and messages."""
    (line,) = load_profile(REPOSITORY / "configs/clusters/conda.yaml").setup
    tar = 'tar() { echo unpacked >> calls; mkdir -p "$4/bin"; echo exit $FAILS > "$4/bin/python"; '
    tar += 'chmod +x "$4/bin/python"; }'
    line = line.replace("/tmp/$USER", "here").replace("/project/envs/sharmill.tar.gz", "archive")
    (tmp_path / "archive").write_bytes(b"packed")

    def run(fails: str = "0") -> tuple[int, str]:
        environ = {"PATH": "/usr/bin:/bin", "FAILS": fails, "USER": "bob"}
        command = ["bash", "-c", f"{tar}\n{line}"]
        ended = subprocess.run(command, env=environ, cwd=tmp_path, check=False, capture_output=True, text=True)
        return ended.returncode, ended.stderr

    return run


def test_the_environment_of_conda_is_unpacked_once_on_each_node(tmp_path, unpack):
    """The second job finds it there, one that is not whole is made again, and another archive is unpacked anew."""
    calls = tmp_path / "calls"
    assert [unpack("3")[0], unpack()[0], unpack()[0]] == [3, 0, 0]
    assert calls.read_text().split() == ["unpacked"] * 2
    (tmp_path / "archive").write_bytes(b"packed anew")
    assert [unpack()[0], unpack()[0]] == [0, 0]
    assert calls.read_text().split() == ["unpacked"] * 3
    (tmp_path / "archive").unlink()
    assert unpack()[0] == 1


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_the_environment_of_conda_is_not_taken_from_a_folder_in_which_others_can_write(tmp_path, unpack, kind):
    (tmp_path / "private").mkdir(mode=0o700)
    foreign = tmp_path / "here-sharmill"
    if kind == "a link":
        foreign.symlink_to("private")
    else:
        foreign.mkdir()
        foreign.chmod(0o777)
    assert unpack() == (1, "here-sharmill is no private folder of bob\n")
    assert not (tmp_path / "calls").exists()
