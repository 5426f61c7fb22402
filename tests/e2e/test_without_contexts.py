"""``match: null`` with the command line: all stages, a killed run that goes on, all commands on the result."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from support.pipelines import digest, run_sharmill
from support.shar import put, voice

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


def test_plan_and_status_show_the_stages_there_are(finished):
    folder, _ = finished
    for arguments in (["plan", folder / "config.yaml"], ["status", folder / "run"]):
        outcome = run_sharmill(*arguments)
        assert outcome.returncode == 0, outcome.stderr
        shown = [line.split()[0] for line in outcome.stdout.splitlines() if line and line.split()[0].isascii()]
        own = ["prepare", "write", "survey", "encode/builtin", "assemble/builtin", "validate"]
        assert [name for name in shown if name in (*own, "match")][:6] == own


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
