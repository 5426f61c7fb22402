"""Runs of real datasets on a real cluster, from the command line."""

import os
import re
import subprocess

import pytest
import yaml
from support.project import REPOSITORY, check_page, damage_shard, outcome, run_sharmill
from support.toy_cluster import slurm
from support.toy_stage import wait_until

from sharmill.shar import open_shar
from sharmill.shar.dataset import ShardedDataset

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

RANKS = {"cores": 1, "memory_gb": 1.5, "timeout_min": 60, "device": "cpu"}


@pytest.fixture
def profile(tmp_path):
    """A profile with three ranks on the gpu partition and four on cpu; no stage runs in a driver job."""
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
    shown = run_sharmill("submit", "all", *configs, "--profile", profile, "--wait")
    assert shown.stdout.count(": done: all stages are done") == 2
    assert [outcome(config.parent) for config in configs] == local_outcomes
    for config in configs:
        check_page(config.parent)
        assert "run: finished" in run_sharmill("status", config.parent / "run").stdout
        # Blocks of segments are encoded on GPUs; codes are put into shards on CPUs.
        scripts = [path.read_text() for path in (config.parent / "run/jobs").glob("*_submission.sh")]
        for stage, partitions in (("prepare", {"cpu"}), ("encode-tiny", {"gpu", "cpu"})):
            own = [text for text in scripts if re.search(f"--job-name=.*-{stage}$", text, re.MULTILINE)]
            assert {re.search("--partition=(.*)", text)[1] for text in own} == partitions


def test_an_append_ends_in_the_dataset_that_grows(tmp_path, make_config, corpus, profile):
    lines = corpus.manifest.read_text().splitlines(keepends=True)
    half = tmp_path / "half.json"
    half.write_text("".join(lines[::2]))
    plain = {"match": None, "encode": {"codecs": []}}
    old = make_config(
        tmp_path / "old", sources=[{"manifest": str(half), "audio_root": str(corpus.audio_root)}], **plain
    )
    run_sharmill("run", old)
    dataset = tmp_path / "old/dataset"
    # A single driver job processes all stages, since none needs a GPU.
    profile.write_text(yaml.safe_dump(yaml.safe_load(profile.read_text()) | {"driver_units": 50}))
    more = make_config(tmp_path / "new", **plain, append_to=str(dataset), max_reject_fraction=0.7)
    shown = run_sharmill("submit", "all", more, "--profile", profile, "--dry-run")
    assert f"after all stages, its shards are appended to {dataset}" in shown.stdout
    shown = run_sharmill("submit", "all", more, "--profile", profile, "--wait")
    assert f"all stages are done; {dataset}: appended the shards" in " ".join(shown.stdout.split())
    assert len(list((tmp_path / "new/run/jobs").glob("*_submission.sh"))) == 2
    ids = {cut.id for cut in open_shar(dataset, [])}
    assert ids > {cut.id for cut in open_shar(tmp_path / "new/dataset", [])}
    assert len(ids) == ShardedDataset(dataset).record().num_cuts


def test_findings_are_repaired_on_the_cluster(tmp_path, make_config, profile):
    config = make_config(tmp_path)
    run_sharmill("run", config)
    before = outcome(tmp_path)
    report = damage_shard(tmp_path)
    assert outcome(tmp_path) != before
    run_sharmill("submit", "all", config, "--redo", report, "--profile", profile, "--wait")
    assert outcome(tmp_path) == before


def test_dry_run_submits_nothing_and_shows_valid_scripts(tmp_path, make_config, profile):
    """The lines of the scripts may be long."""
    config = make_config(tmp_path / "a" / ("long-" * 20))
    shown = run_sharmill("submit", "all", config, "--profile", profile, "--dry-run")
    assert "small, prepare: 6 units (54 records) on 4 cpu ranks; at most 4 run at once" in shown.stdout
    assert "small, prepare: 10.0 to 20.0 records per rank, balance 68%" in shown.stdout
    assert "#SBATCH --array=0-3%4" in shown.stdout
    script = tmp_path / "script.sh"
    script.write_text(shown.stdout[shown.stdout.index("#!/bin/bash") :])
    slurm("sbatch", "--test-only", script)
    assert f"submitit.core._submit {config.parent}/run/jobs\n" in script.read_text()
    assert not (config.parent / "run" / "id").exists()


def test_sbatch_files_process_several_datasets_as_one_array(tmp_path, make_two_configs, local_outcomes):
    """All stages are submitted at once; each task waits for the previous stage of the same dataset."""
    # Both datasets have contexts, since each stage is one array for both.
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


def test_an_sbatch_task_continues_after_its_time_limit_signal(tmp_path, make_config):
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
