"""Consecutive training jobs: submitted commands, and refusals."""

import json
import re
from pathlib import Path

import launch_training
import pytest

CONFIG = "dataset: data\nout_dir: {}\nmax_steps: 10\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text(CONFIG.format(tmp_path / "out"))
    return path


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an ``sbatch`` that records its arguments and numbers the jobs, and return the file of records."""
    notes = tmp_path / "sbatch.log"
    script = tmp_path / "bin" / "sbatch"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@" >> {notes}\necho "$((100 + $(wc -l < {notes})));cluster"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    return notes


def test_each_job_waits_for_the_one_before(
    config: Path, sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_training.main(["-n", "3", "--after", "7", str(config), "learning_rate=0.01"]) == 0
    lines = sbatch.read_text().splitlines()
    assert [re.search(r"afterany:(\S+)", line)[1] for line in lines] == ["7", "101", "102"]
    assert all(line.endswith("learning_rate=0.01 shard_seed=randomized") for line in lines), (
        "all jobs have the training's seed"
    )
    noted = [json.loads(line) for line in (tmp_path / "out" / "jobs.jsonl").read_text().splitlines()]
    assert noted == [{"job": str(101 + n), "after": after} for n, after in enumerate(["7", "101", "102"])]
    assert "job 103, after 102" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["salm", "s2s_duplex"])
def test_jobs_of_a_nemo_script_have_different_seeds(
    sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    script = tmp_path / f"{name}_train.py"
    script.touch()
    arguments = ["-n", "3", "--script", str(script), f"configs/training/{name}.yaml", "trainer.max_steps=5"]
    assert launch_training.main(arguments) == 0
    lines = [line.partition("jobs/sbatch/nemo.sbatch ")[2].split() for line in sbatch.read_text().splitlines()]
    assert [line[1:] for line in lines] == [arguments[3:]] * 3
    assert len({int(line[0]) for line in lines}) == 3
    assert "job 103, after 102" in capsys.readouterr().out


def test_an_own_script_gets_a_seed_and_the_overrides(
    sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.sub").write_text("#!/bin/bash\n#SBATCH --nodes=4\n")
    arguments = ["-n2", "--sbatch=--account=lab", "my.sub", "trainer.max_steps=5", "data.train_ds.num_workers=1"]
    assert launch_training.main(arguments) == 0
    first, second = sbatch.read_text().splitlines()
    told = r"--parsable --account=lab{} my.sub (\d+) trainer.max_steps=5 data.train_ds.num_workers=1"
    seeds = {
        re.fullmatch(told.format(""), first)[1],
        re.fullmatch(told.format(" --dependency=afterany:101"), second)[1],
    }
    assert len(seeds) == 2


def test_the_profile_sets_the_resources_of_a_job(config: Path, sbatch: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text("account: lab\nsignal_s: 45\ngpu: {partition: big, gpus: 1, cores: 8, memory_gb: 10}\n")
    options = ["-n", "1", "--nodes", "2", "--ranks-per-node", "4", "--profile", str(profile), "--sbatch=--exclusive"]
    options.append(str(config))
    assert launch_training.main(options) == 0
    asked = set(sbatch.read_text().split())
    assert {"--partition=big", "--account=lab", "--gpus-per-node=4", "--cpus-per-task=32", "--mem=40960M"} <= asked
    assert {"--nodes=2", "--signal=B:TERM@45", "--exclusive"} <= asked


def test_a_profile_can_replace_gpus_and_memory_by_other_options(config: Path, sbatch: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    extra = "{gres: 'gpu:a100:1,tmp:5G', mem_per_cpu: 4G, exclusive: true, constraint: null}"
    profile.write_text(f"gpu: {{gpus: 1, cores: 8, memory_gb: null, extra: {extra}}}\n")
    assert launch_training.main(["-n1", "--ranks-per-node", "4", "--profile", str(profile), str(config)]) == 0
    asked = {
        option for option in sbatch.read_text().split() if re.match("--(gpus|gres|mem|exclusive|constraint)", option)
    }
    assert asked == {"--gres=gpu:a100:4,tmp:5G", "--mem-per-cpu=4G", "--exclusive"}
    assert launch_training.main(["-n1", "--sbatch=--mem-per-gpu=64G", str(config)]) == 0
    assert "--mem=" not in sbatch.read_text()
    assert "#SBATCH --mem" not in Path("jobs/sbatch/train.sbatch").read_text(), (
        "sbatch would refuse another memory option"
    )


def test_a_refusal_names_the_command(
    config: Path, sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'not available' >&2\nexit 1\n")
    assert launch_training.main(["-n", "1", "--sbatch=--partition=big", str(config)]) == 2
    error = capsys.readouterr().err
    assert "not available; the command was: sbatch --parsable --nodes=1 --mem=64G --partition=big " in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "2", "{config}", "shard_seed=1"], "shard_seed"),
        (["-n", "0", "{config}"], "-n"),
        (["-n", "1", "{config}", "max_stepz=1"], "max_steps"),
        (["-n", "1", "--script", "salm_trein.py", "{config}"], "no salm_trein.py"),
        (["-n", "1", "--nodes", "0", "{config}"], "--nodes"),
        (["-n", "1", "--nodes", "2", "jobs/sbatch/ray.sbatch"], "requests its own resources"),
        (
            [
                "-n",
                "2",
                "--script",
                "jobs/train.py",
                "configs/training/salm.yaml",
                "data.train_ds.shard_seed=randomized",
            ],
            "shard_seed: randomized with resumable: true, but each job has another seed; use a number",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], said: str, config: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_training.main([argument.format(config=config) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not sbatch.exists()
