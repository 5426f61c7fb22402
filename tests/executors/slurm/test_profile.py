"""Cluster profiles: their values, and the scripts generated from the examples in configs/clusters."""

import re
import subprocess

import pytest
from support.project import REPOSITORY, raises
from support.toy_cluster import ToyDataset, ToyRun
from support.toy_stage import ToyStage

from sharmill.config import load_typed
from sharmill.errors import ConfigError
from sharmill.executors.slurm.profile import ClusterProfile


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("max_paralel: 3", "unknown_key", ["'max_paralel'", "'max_parallel'"]),
        ("gpu: {partitoin: gpu}", "unknown_key", ["'gpu.partitoin'", "'partition'"]),
        ("cpu: {cores: many}", "bad_config_value", ["cpu.cores"]),
        ("cpu: {cores: 0}", "bad_config_value", ["cores"]),
        ("gpu: {device: tpu}", "bad_config_value", ["device", "tpu"]),
        ("max_parallel: 0", "bad_config_value", ["max_parallel"]),
        ("cpu: {extra: {array: 0-9}}", "bad_config_value", ["extra", "array"]),
        ("cpu: {extra: {time: 10}}", "bad_config_value", ["extra", "time", "timeout_min"]),
        ("cpu: {extra: {mem_per_cpu: 4G}}", "bad_config_value", ["extra", "mem-per-cpu", "memory_gb", "null"]),
        ("cpu: {extra: {ntasks: 2}}", "bad_config_value", ["extra", "ntasks", "one task"]),
        ("stages: {wirte: {cores: 2}}", "bad_config_value", ["'wirte'", "'write'"]),
        ("stages: {write: {core: 2}}", "bad_config_value", ["stages.write", "'core'", "'cores'"]),
        ("stages: {write: {cores: 0}}", "bad_config_value", ["stages.write", "cores"]),
        ("stages: {match: {extra: {array: 1}}}", "bad_config_value", ["extra", "array"]),
        ("{signal_s: 120, stages: {driver: {timeout_min: 2}}}", "bad_config_value", ["120", "stages.driver.timeout"]),
        ("{signal_s: 120, gpu: {timeout_min: 2}}", "bad_config_value", ["signal_s", "120", "gpu.timeout_min"]),
        ("gpu: {gpus: 8}", "bad_config_value", ["gpu.gpus"]),
        ("- a list", "bad_config_file", []),
    ],
)
def test_errors_in_a_profile_are_named(tmp_path, text, code, names):
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with raises(ConfigError, code, str(path), *names):
        load_typed(ClusterProfile, path)


def test_a_stage_has_its_own_values_or_those_of_gpu_or_cpu(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text(
        "gpu: {partition: gpu, gpus: 1, cores: 8, extra: {constraint: a100, comment: ours}}\n"
        "stages: {encode: {partition: h200, timeout_min: 30, extra: {constraint: h200}}, driver: {account: free}}\n"
    )
    profile = load_typed(ClusterProfile, path)
    encode, match = profile.for_stage("encode", "gpu"), profile.for_stage("match", "gpu")
    assert (encode.partition, encode.cores, encode.gpus, encode.timeout_min) == ("h200", 8, 1, 30)
    assert encode.extra == {"constraint": "h200", "comment": "ours"}
    assert (match.partition, match.timeout_min, match.extra["constraint"]) == ("gpu", 240, "a100")
    assert profile.driver.account == "free"
    assert profile.for_stage("write", "cpu") == profile.cpu


EXAMPLES = sorted((REPOSITORY / "configs/clusters").glob("*.yaml"))


class MatchStage(ToyStage):
    kind = "match"
    resource = "gpu"


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Return a function: name of an example -> the scripts of GPU ranks, of CPU ranks, and of driver jobs."""
    monkeypatch.chdir(tmp_path)

    def make(name: str) -> list[str]:
        profile = load_typed(ClusterProfile, REPOSITORY / f"configs/clusters/{name}.yaml")
        stage = ToyStage(tmp_path)
        run = ToyRun(ToyDataset(stage), profile)
        return [run.scripts(MatchStage(tmp_path).in_run, 2)[0], *run.scripts(stage.in_run, 2)[:2]]

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


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("apptainer", " apptainer exec --nv /images/sharmill.sif python -u -m submitit.core._submit "),
        ("pyxis", "--container-image=/images/sharmill.sqsh --container-workdir={} "
                  "--container-mounts=/data:/data,/runs:/runs python -u -m submitit.core._submit "),
    ],
)  # fmt: skip
def test_ranks_run_in_a_container_and_advance_jobs_do_not(scripts, tmp_path, name, command):
    assert [command.format(tmp_path) in script for script in scripts(name)] == [True, True, False]


@pytest.fixture
def unpack(tmp_path):
    """Return a function that runs conda's setup line with a fake tar, and returns the exit status and messages."""
    (line,) = load_typed(ClusterProfile, REPOSITORY / "configs/clusters/conda.yaml").setup
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
    """The second job reuses it; an incomplete environment and a changed archive are unpacked again."""
    calls = tmp_path / "calls"
    assert [unpack("3")[0], unpack()[0], unpack()[0]] == [3, 0, 0]
    assert calls.read_text().split() == ["unpacked"] * 2
    (tmp_path / "archive").write_bytes(b"packed anew")
    assert [unpack()[0], unpack()[0]] == [0, 0]
    assert calls.read_text().split() == ["unpacked"] * 3
    (tmp_path / "archive").unlink()
    assert unpack()[0] == 1


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_the_conda_environment_is_never_in_a_folder_of_others(tmp_path, unpack, kind):
    (tmp_path / "private").mkdir(mode=0o700)
    foreign = tmp_path / "here-sharmill"
    if kind == "a link":
        foreign.symlink_to("private")
    else:
        foreign.mkdir()
        foreign.chmod(0o777)
    assert unpack() == (1, "here-sharmill is not private to bob\n")
    assert not (tmp_path / "calls").exists()
