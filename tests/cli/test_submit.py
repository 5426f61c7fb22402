"""`sharmill submit --dry-run`: every dataset is shown or named, whatever the others are like."""

import json
import re
from pathlib import Path

import pytest
from support.project import Project

from sharmill.config import to_yaml
from sharmill.engine.executor import Submitted
from sharmill.errors import ConfigError
from sharmill.executors.slurm.executor import SlurmExecutor


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch, tmp_path):
    """Hide SLURM's commands, which would otherwise be asked for the limits of the cluster."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def make_config(tmp_path):
    """Returns a function: name -> a project with two records, and the path of its configuration."""

    def make(name: str):
        folder = tmp_path / name
        folder.mkdir()
        project = Project(folder).add_voices([0.2] * 2, "{}.wav", speaker="s")
        config = project.configure(match=None)
        path = folder / "config.yaml"
        path.write_bytes(to_yaml(config))
        return config, path

    return make


def test_dry_run_shows_known_jobs_and_a_line_per_later_stage(make_config, call, tmp_path):
    profile = tmp_path / "profile.yaml"
    profile.write_text("driver_units: 0\ncpu: {max_ranks: 9}\n")
    arguments = (make_config("a")[1], "encode.codecs=[{name: b, model: builtin}]", "--profile", profile)
    status, out, _ = call("submit", "all", *arguments, "--dry-run")
    assert status == 0
    assert "prepare: 1 unit (2 records) on 1 cpu rank; at most 1 run at once" in " ".join(out.split())
    assert re.findall("--dependency=.*", out) == ["--dependency=afterany:RANKS", "--dependency=afternotok:ADVANCE"]
    assert out.count("#!/bin/bash") == 3
    later = r", (\S+), later: at most (\d+ \w+) ranks"
    assert re.findall(later, out) == [("write", "9 cpu"), ("encode/b", "64 gpu"), ("validate", "9 cpu")]
    _, out, _ = call("submit", "all", *arguments, "--dry-run", "--verbose")
    names = [name for name, _ in re.findall(later, out)]
    assert names == ["write", "encode.segments", "encode/b", "encode.shards/b", "validate"]


def test_a_partial_run_names_finished_and_remaining_stages(make_config, call):
    """A second run without work prints the same; submit and status show the recorded outcome."""
    config, path = make_config("a")
    told = []
    for names in (["prepare"], ["prepare", "write"], ["prepare"], []):
        call("run", path, *names, "encode.codecs=[]")
        told.append(re.search("run: finished .{19}(.*)", call("status", config.run_dir)[1])[1])
    assert told == [
        ": prepare done as requested; left: write, validate",
        ": prepare, write done as requested; left: validate",
        ": prepare done as requested; left: validate",
        "",
    ]


@pytest.mark.parametrize(("folder", "shown"), [("run", ["prepare", "write", "validate"]), ("other", ["validate"])])
def test_a_finished_dataset_needs_no_sources(make_config, call, tmp_path, folder, shown):
    config, path = make_config("a")
    call("run", path, "encode.codecs=[]")
    run_dir = Path(config.run_dir).with_name(folder)
    overrides = ("sources=[]", "encode.codecs=[]", f"run_dir={run_dir}")
    assert "not yet" not in call("plan", path, *overrides)[1]
    for names in ([], ["validate"]):
        assert call("run", path, *names, *overrides)[0] == 0
        _, out, _ = call("status", run_dir)
        assert re.findall(r"(?m)^(\w+) +done ", out) == shown
        assert re.search("run: finished .{19}\n", out)


def test_dry_run_of_a_restart_shows_its_jobs_and_changes_nothing(make_config, call, tmp_path):
    path = make_config("a")[1]
    call("run", path, "prepare", "write")
    for stage in ("prepare", "write"):
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        _, out, _ = call("submit", stage, path, "--dry-run")
        assert "nothing left to submit" in out
        _, out, _ = call("submit", stage, path, "--restart", "--dry-run")
        assert f"small, {stage}: 1 unit in the driver job itself" in out
        assert out.count("#!/bin/bash") == 2
        assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("cluster", ["local", "debug"])
def test_dry_run_without_slurm_is_refused_and_runs_nothing(make_config, call, tmp_path, cluster):
    status, _, error = call("submit", "prepare", make_config("a")[1], "--cluster", cluster, "--dry-run")
    assert (status, "sharmill plan CONFIG" in error) == (2, True)
    assert not (tmp_path / "a/run").exists()


def test_datasets_share_the_ranks_that_run_at_once(make_config, call, tmp_path):
    profile = tmp_path / "profile.yaml"
    configs = [make_config(name)[1] for name in ("a", "b")]
    own = "cpu: {max_ranks: 9}\nstages: {prepare: {max_parallel: 8}}\ndriver_units: 0\n"
    for total, at_once in (("4", 2), ("3", 1), ("1", 1), ("null", 2)):
        profile.write_text(f"{own}max_parallel_all: {total}\n")
        _, out, _ = call("submit", "prepare", *configs, "prepare.unit_records=1", "--profile", profile, "--dry-run")
        assert re.findall(r"#SBATCH --array=0-1%(\d+)", out) == [str(at_once)] * 2


@pytest.mark.parametrize(
    ("ranks", "asked"),
    [
        ({}, ["--cpus-per-task=1", "--mem=4096M"]),
        ({"memory_gb": None}, ["--cpus-per-task=1"]),
        ({"memory_gb": None, "extra": {"mem-per-cpu": "4G"}}, ["--cpus-per-task=1", "--mem-per-cpu=4G"]),
        ({"memory_gb": None, "extra": {"mem_per_cpu": "4G"}}, ["--cpus-per-task=1", "--mem-per-cpu=4G"]),
        ({"memory_gb": None, "extra": {"mem": 0}}, ["--cpus-per-task=1", "--mem=0"]),
        ({"gpus": 1}, ["--cpus-per-task=1", "--gpus-per-node=1", "--mem=4096M"]),
        ({"gpus": 1, "extra": {"gres": "gpu:a100:1"}}, ["--cpus-per-task=1", "--gres=gpu:a100:1", "--mem=4096M"]),
        ({"gpus": 1, "extra": {"gres": "tmp:5G"}}, ["--cpus-per-task=1", "--gpus-per-node=1", "--gres=tmp:5G",
                                                     "--mem=4096M"]),
        ({"extra": {"constraint": None, "wckey": None, "exclusive": False}}, ["--cpus-per-task=1", "--mem=4096M"]),
        ({"extra": {"wckey": "speech", "exclusive": True, "exclude": ["n1", "n2"]}},
         ["--cpus-per-task=1", "--exclude=n1,n2", "--exclusive", "--mem=4096M", "--wckey=speech"]),
    ],
)  # fmt: skip
def test_sbatch_is_asked_for_what_the_profile_has(make_config, call, tmp_path, ranks, asked):
    """Both rank jobs and driver jobs pass the options of the profile to sbatch."""
    profile = tmp_path / "profile.yaml"
    profile.write_text(json.dumps({"cpu": ranks, "driver_units": 0}))
    _, out, _ = call("submit", "prepare", make_config("a")[1], "--profile", profile, "--dry-run")
    own = "array|comment|dependency|error|job-name|kill-on-invalid-dep|nodes|open-mode|output|requeue|signal|time"
    shown = [
        re.findall(rf"^#SBATCH (?!--(?:{own})\b)(--.*)$", script, re.MULTILINE) for script in out.split("#!/bin/bash")
    ]
    assert shown == [[], asked, asked, asked]


def test_an_option_of_all_ranks_is_left_out_for_one_stage(make_config, call, tmp_path):
    profile = tmp_path / "profile.yaml"
    ranks = "memory_gb: null, extra: {constraint: a100, mem-per-cpu: 2G}"
    own = "memory_gb: 3, extra: {constraint: null, mem_per_cpu: null}"
    profile.write_text(f"cpu: {{{ranks}}}\nstages: {{prepare: {{{own}}}}}\ndriver_units: 0\n")
    _, out, _ = call("submit", "prepare", make_config("a")[1], "--profile", profile, "--dry-run")
    assert re.findall("--(?:mem|constraint).*", out) == ["--mem=3072M", *["--constraint=a100", "--mem-per-cpu=2G"] * 2]


def test_json_of_what_would_be_submitted(make_config, call):
    (bad, path), (_, good) = make_config("a"), make_config("b")
    (bad_root := type(path)(bad.sources[0].audio_root)).rename(bad_root.with_name("moved"))
    status, out, _ = call("submit", "prepare", path, good, "--json", "--dry-run")
    first, second = json.loads(out)
    assert status == 2
    assert (first["name"], first["code"]) == (bad.name, "missing_input")
    assert second["stage"] == "prepare"
    assert [script.startswith("#!/bin/bash") for script in second["scripts"]] == [True, True]
    assert second["balance"][0] == "1 unit in the driver job itself, on 1 worker"


def test_json_of_runs_has_their_state_or_their_error(make_config, call, monkeypatch):
    (config, one), (_, other) = make_config("a"), make_config("b")

    def start(run):
        if str(run.run_dir.path) == config.run_dir:
            return Submitted("submitted", ["7", "8"])
        raise ConfigError("no", code="bad_usage")

    monkeypatch.setattr(SlurmExecutor, "start", start)
    status, out, _ = call("submit", "prepare", one, other, "--json")
    first, second = json.loads(out)
    assert status == 2
    assert (first["state"], first["message"], first["jobs"]) == ("waiting", "submitted", ["7", "8"])
    assert (second["error"], second["code"]) == ("no", "bad_usage")
