"""Real datasets through the command line on a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from support.paths import REPOSITORY
from support.pipelines import check_page, damage, outcome, run_sharmill
from support.toy_cluster import slurm
from support.toy_stage import wait_until

from sharmill.shar import open_shar
from sharmill.shar.dataset import ShardedDataset

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

RANKS = {"cores": 1, "memory_gb": 1.5, "timeout_min": 60, "device": "cpu"}


@pytest.fixture
def profile(tmp_path):
    """Three ranks on the gpu partition, four on cpu, as in configs/clusters/test.yaml; all stages have ranks."""
    values = {
        "driver_units": 0,
        "max_parallel": 8,
        "signal_s": 30,
        "gpu": RANKS | {"partition": "gpu", "max_ranks": 3, "gpus": 1},
        "cpu": RANKS | {"partition": "cpu", "max_ranks": 4},
        "setup": ["export OMP_NUM_THREADS=1"],
    }
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_two_datasets_have_the_bytes_of_a_local_run(tmp_path, make_two_configs, profile, local_outcomes):
    configs = make_two_configs(tmp_path)
    began = datetime.now()
    shown = run_sharmill("submit", "all", *configs, "--profile", profile, "--wait")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stdout.count(": done: all stages are done") == 2
    assert [outcome(config.parent) for config in configs] == local_outcomes
    for config in configs:
        accounts(config.parent / "run")
        check_page(config.parent)
        values = yaml.safe_load(config.read_text())
        status = run_sharmill("status", config.parent / "run").stdout
        assert "run: done since" in status
        assert status.count(" done ") >= (5 if values["match"] else 4)
        matched = [partition for partition, _ in ranks_of(f"{values['name']}-match", began).values()]
        assert matched == (["gpu"] if values["match"] else [])
        # One that still waits in the queue when all is done is ended.
        ((partition, count),) = ranks_of(f"{values['name']}-prepare", began).values()
        assert (partition, count <= 4) == ("cpu", True)
        # Blocks of segments are encoded on GPUs, and put together into shards elsewhere.
        encoded, assembled = (ranks_of(f"{values['name']}-{name}-tiny", began) for name in ("encode", "assemble"))
        assert [partition for partition, _ in encoded.values()] == ["gpu"]
        assert [partition for partition, _ in assembled.values()] == ["cpu"]


def test_an_append_ends_in_the_dataset_that_grows(tmp_path, make_config, corpus, profile):
    lines = corpus.manifest.read_text().splitlines(keepends=True)
    half = tmp_path / "half.json"
    half.write_text("".join(lines[::2]))
    plain = {"match": None, "encode": {"codecs": []}}
    old = make_config(
        tmp_path / "old", sources=[{"manifest": str(half), "audio_root": str(corpus.audio_root)}], **plain
    )
    assert run_sharmill("run", old).returncode == 0
    dataset = tmp_path / "old/dataset"
    # The advance job behind no ranks does all stages, since none needs a GPU.
    profile.write_text(yaml.safe_dump(yaml.safe_load(profile.read_text()) | {"driver_units": 50}))
    more = make_config(tmp_path / "new", **plain, append_to=str(dataset), max_reject_fraction=0.7)
    shown = run_sharmill("submit", "all", more, "--profile", profile, "--dry-run")
    assert f"once all stages are done, its shards are appended to {dataset}" in shown.stdout
    shown = run_sharmill("submit", "all", more, "--profile", profile, "--wait")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert f"all stages are done; {dataset}: appended the shards" in " ".join(shown.stdout.split())
    assert len(list((tmp_path / "new/run/jobs").glob("*_submission.sh"))) == 2
    ids = {cut.id for cut in open_shar(dataset, [])}
    assert ids > {cut.id for cut in open_shar(tmp_path / "new/dataset", [])}
    assert len(ids) == ShardedDataset(dataset).record().num_cuts
    again = run_sharmill("submit", "all", more, "--profile", profile, "--wait")
    assert f"are those of {tmp_path}/new/dataset already" in " ".join(again.stdout.split())
    assert run_sharmill("validate", dataset, "--deep").returncode == 0


def ranks_of(job_name: str, began: datetime) -> dict[str, tuple[str, int]]:
    """Partition and number of tasks of each array of this name, by its job number."""
    command = ["sacct", "-X", "-n", "-P", f"--name={job_name}", "--format=jobid,partition"]
    tasks = [line.split("|") for line in slurm(*command, f"--starttime={began:%Y-%m-%dT%H:%M:%S}").splitlines()]
    counts = Counter((task.split("_")[0], partition) for task, partition in tasks)
    return {array: (partition, count) for (array, partition), count in counts.items()}


def accounts(run_dir: Path) -> None:
    """Every record that came into a stage went on from it or was rejected."""
    for stage in ("prepare", "match", "write"):
        if stage == "match" and not (run_dir / stage).exists():
            continue
        totals = json.loads((run_dir / stage / "done.json").read_bytes())
        assert totals["num_in"] == totals["num_out"] + sum(totals.get("rejects", {}).values())


def test_a_unit_that_fails_shows_in_exit_status_closing_lines_and_status(tmp_path, make_config, profile):
    config = make_config(tmp_path / "a")
    assert run_sharmill("run", config, "prepare", "stage1", "stage2").returncode == 0
    shard = tmp_path / "a" / "dataset" / "target_audio" / "recording.000001.tar"
    shard.write_bytes(bytes(shard.stat().st_size))
    shown = run_sharmill("submit", "stage3", config, "--profile", profile, "--wait")
    assert shown.returncode == 1
    stage = tmp_path / "a" / "run" / "survey"
    for text in (shown.stdout, run_sharmill("status", tmp_path / "a" / "run").stdout):
        lines = " ".join(text.split())
        assert "1 units failed" in lines
        assert "recording.000001.tar" in lines
        assert f"tracebacks: {stage.relative_to(tmp_path)}" in lines.replace(f"{tmp_path}/", "")
    failed = [json.loads(line) for line in (stage / "failures.jsonl").read_bytes().splitlines()]
    assert [error["index"] for error in failed] == [1]
    assert "Traceback" in failed[0]["traceback"]


def test_what_the_checker_names_is_done_again_on_the_cluster(tmp_path, make_config, profile):
    config = make_config(tmp_path)
    assert run_sharmill("run", config).returncode == 0
    before = outcome(tmp_path)
    report = damage(tmp_path)
    assert outcome(tmp_path) != before
    shown = run_sharmill("submit", "all", config, "--redo", report, "--profile", profile, "--wait")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert outcome(tmp_path) == before


def test_dry_run_submits_nothing(tmp_path, make_config, profile):
    config = make_config(tmp_path / "a" / ("long-" * 20))
    shown = run_sharmill("submit", "all", config, "--profile", profile, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "small, prepare: 6 units (54 records) on 4 cpu ranks; at most 4 run at once" in shown.stdout
    assert "small, prepare: 10.0 to 20.0 records per rank, balance 68%" in shown.stdout
    assert "#SBATCH --partition=cpu" in shown.stdout
    assert "#SBATCH --requeue" in shown.stdout
    assert "#SBATCH --array=0-3%4" in shown.stdout
    # The script is one that SLURM takes, however long its lines.
    script = tmp_path / "script.sh"
    script.write_text(shown.stdout[shown.stdout.index("#!/bin/bash") :])
    slurm("sbatch", "--test-only", script)
    assert f"submitit.core._submit {config.parent}/run/jobs\n" in script.read_text()
    assert not [
        config.parent / "run" / name for name in ("id", "given.json") if (config.parent / "run" / name).exists()
    ]


def test_sbatch_files_process_several_datasets_as_one_array(tmp_path, make_two_configs, local_outcomes):
    """All at once: each task waits for the same dataset's task of the stage before it."""
    # Both with contexts, since every stage is one array of both.
    configs = [make_two_configs(tmp_path / name)[0] for name in ("one", "two")]
    options = ["--parsable", "--array=0-1", "--partition=cpu", "--gpus-per-node=0", "--cpus-per-task=1", "--mem=2G"]
    after: list[str] = []
    for stage, kind in (("prepare", "cpu"), ("match", "gpu"), ("write", "cpu"), ("encode", "gpu"), ("validate", "cpu")):
        output = f"--output={tmp_path}/{stage}-%a.log"
        command = ["sbatch", *options, *after, output, f"jobs/sbatch/{kind}.sbatch", stage]
        submitted = subprocess.run(
            [*command, *configs], cwd=REPOSITORY, check=True, capture_output=True, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        after = [f"--dependency=aftercorr:{submitted.stdout.strip()}"]
    wait_until(lambda: not slurm("squeue", "--noheader", "--format=%i", f"--jobs={submitted.stdout.strip()}"), 200)
    for number in range(2):
        assert "validation: no findings" in (tmp_path / f"validate-{number}.log").read_text()
    assert [outcome(config.parent) for config in configs] == [local_outcomes[0]] * 2


def test_an_sbatch_task_goes_on_after_its_time_limit_signal(tmp_path, make_config):
    config = make_config(tmp_path / "a")
    submitted = slurm(
        "sbatch", "--parsable", "--array=0-0", "--partition=cpu", "--cpus-per-task=1", "--mem=2G",
        f"--chdir={REPOSITORY}", f"--output={tmp_path}/log", REPOSITORY / "jobs/sbatch/cpu.sbatch",
        "prepare", config,
    ).strip()  # fmt: skip
    lock = tmp_path / "a" / "run" / "prepare"
    wait_until(lock.exists)
    slurm("scancel", "--batch", "--signal=USR1", f"{submitted}_0")
    wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", f"{submitted}_0"))
    wait_until(lambda: (lock / "done.json").exists())
