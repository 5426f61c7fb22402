"""``match: null`` with the command line: all stages, a killed run that goes on, all commands on the result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from support.paths import REPOSITORY
from support.pipelines import command, digest, run_sharmill
from support.shar import lines, put, voice

from sharmill.shar import open_shar

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_GOOD = 12


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with audio, a manifest without speakers (two of its records are bad) and a configuration over it."""
    folder = tmp_path_factory.mktemp("project")
    records = [{"audio_filepath": "absent.wav", "duration": 1.0, "text": "not there"}, {"text": "no audio at all"}]
    for number in range(NUM_GOOD):
        samples = voice(0.4 + 0.1 * number, pitch=150 + 10 * number, seed=number)
        put(folder / f"audio/call/{number}.wav", samples)
        record = {"audio_filepath": f"call/{number}.wav", "duration": len(samples) / 16000, "text": f"text {number}"}
        records.append(record)
    (folder / "calls.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {
        "name": "calls",
        "run_dir": str(folder / "run"),
        "dataset_dir": str(folder / "dataset"),
        "sources": [{"manifest": str(folder / "calls.json"), "audio_root": str(folder / "audio")}],
        "prepare": {"unit_records": 4},
        "match": None,
        "write": {"shard_seconds": 2.5},
        "executor": {"workers": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder


@pytest.fixture(scope="module")
def finished(project):
    """The folder after a run with the built-in codec."""
    outcome = run_sharmill("run", project / "config.yaml", "validate.deep=true", "validate.against_sources=true")
    assert outcome.returncode == 0, outcome.stderr + outcome.stdout
    return project, outcome.stdout


def test_all_stages_run_but_match(finished):
    folder, printed = finished
    for expected in ("prepare", "write", "encode/builtin", "no findings", "missing_audio 1", "missing_field 1"):
        assert expected in printed
    assert "match" not in printed
    assert "accounted for: 14 records of the manifests: 12 found as cuts, 2 found among the rejects, 0 not found" in (
        " ".join(printed.split())
    )
    assert not (folder / "run/match").exists()
    assert sorted(path.name for path in (folder / "dataset").iterdir()) == [
        "codes_builtin", "cuts", "dataset.json", "shards.jsonl", "target_audio",
    ]  # fmt: skip


def test_shards_are_as_many_as_the_seconds_ask_for(finished):
    shards = lines(finished[0] / "dataset/shards.jsonl")
    seconds = [shard["target_seconds"] for shard in shards]
    assert len(shards) == round(sum(seconds) / 2.5)
    assert max(seconds) - min(seconds) < 1.5 + 1e-6  # the longest utterance


def test_a_directory_is_validated_against_its_manifest(finished, tmp_path):
    folder, _ = finished
    outcome = run_sharmill(
        "validate", folder / "dataset", "--deep", "--against", folder / "calls.json",
        "--rejects", folder / "run/rejects.jsonl", "--json", tmp_path / "report.json", "--workers", 1,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr + outcome.stdout
    checked = json.loads((tmp_path / "report.json").read_text())["checked"]
    found = {name: checked[f"records {name}"] for name in ("found as cuts", "found among the rejects", "not found")}
    assert found == {"found as cuts": NUM_GOOD, "found among the rejects": 2, "not found": 0}
    assert checked["items decoded"] == NUM_GOOD


def test_the_stage_match_is_refused(finished):
    config = finished[0] / "config.yaml"
    for arguments in (["run", config, "match"], ["submit", "stage1", config, "--dry-run"]):
        outcome = run_sharmill(*arguments)
        assert outcome.returncode == 2
        assert outcome.stderr.startswith("Error: calls has no stage match: match is null")
        assert len(outcome.stderr.splitlines()) == 1


def test_the_recipe_of_match_is_refused_as_well(finished):
    recipe = REPOSITORY / "pipelines/match_context.py"
    outcome = subprocess.run(
        [sys.executable, recipe, finished[0] / "config.yaml"], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("Error: calls has no stage match: match is null")


def test_all_stages_there_are_can_be_submitted(finished, tmp_path, monkeypatch):
    # Stands in for SLURM's own, which may be installed here and have no controller to ask.
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text("#!/bin/sh\necho 'MaxArraySize = 1001'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}")
    own = [f"run_dir={tmp_path / 'run'}", f"dataset_dir={tmp_path / 'dataset'}"]
    outcome = run_sharmill("submit", "all", finished[0] / "config.yaml", "--dry-run", *own)
    assert outcome.returncode == 0, outcome.stderr
    assert "calls, prepare: 4 units" in outcome.stdout


def test_plan_and_status_show_the_stages_there_are(finished):
    folder, _ = finished
    for arguments in (["plan", folder / "config.yaml"], ["status", folder / "run"]):
        outcome = run_sharmill(*arguments)
        assert outcome.returncode == 0, outcome.stderr
        shown = [line.split()[0] for line in outcome.stdout.splitlines() if line and line.split()[0].isascii()]
        own = ["prepare", "write", "survey", "encode/builtin", "assemble/builtin", "validate"]
        assert [name for name in shown if name in (*own, "match")][:6] == own


def test_what_is_damaged_is_mended(finished, tmp_path):
    folder, _ = finished
    before = digest(folder / "dataset")
    path = folder / "dataset/target_audio/recording.000001.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    report = tmp_path / "report.json"
    assert run_sharmill("validate", folder / "dataset", "--json", report, "--workers", 1).returncode == 3
    outcome = run_sharmill("run", folder / "config.yaml", "--redo", report)
    assert outcome.returncode == 0, outcome.stderr + outcome.stdout
    assert digest(folder / "dataset") == before


def test_the_index_is_made_again_and_sidecars_and_bins_are_made(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished[0] / "dataset", copy)
    before = digest(copy)
    (copy / "shards.jsonl").unlink()
    assert run_sharmill("index", copy).returncode == 0
    assert digest(copy) == before
    for arguments in (["bins", copy, "--buckets", 2], ["sidecars", copy]):
        outcome = run_sharmill(*arguments)
        assert outcome.returncode == 0, outcome.stderr
    assert run_sharmill("validate", copy, "--workers", 1).returncode == 0
    assert len(list(open_shar(copy))) == NUM_GOOD


def test_a_killed_run_goes_on_to_the_same_bytes(finished, tmp_path):
    folder, _ = finished
    own = [f"run_dir={tmp_path / 'run'}", f"dataset_dir={tmp_path / 'dataset'}"]
    arguments = ["run", folder / "config.yaml", "prepare", "write", *own]
    killed = subprocess.Popen(command(*arguments), cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while killed.poll() is None and time.monotonic() < limit:
        if any(path.stat().st_size for path in (tmp_path / "run/write").glob("ranks/*/ledger/*.jsonl")):
            killed.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    killed.wait()
    outcome = run_sharmill(*arguments)
    assert outcome.returncode == 0, outcome.stderr + outcome.stdout
    final = digest(folder / "dataset")
    made = {name: checksum for name, checksum in final.items() if name.startswith(("cuts/", "target_audio/"))}
    found = digest(tmp_path / "dataset")
    assert {name: found.get(name) for name in made} == made
    assert found.keys() - made.keys() == {"dataset.json", "shards.jsonl"}
