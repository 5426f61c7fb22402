"""The checker from the command line: damage, its report, --redo, and a second validation that is clean."""

from __future__ import annotations

import json

import pytest
import yaml
from support.pipelines import digest, run_sharmill

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def flip(path, position=2000):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_damage_is_found_done_again_and_gone(make_config, corpus, tmp_path):
    folder, report = tmp_path / "project", tmp_path / "findings.json"
    config = make_config(folder, validate={"against_sources": True})
    first = run_sharmill("run", config)
    assert first.returncode == 0, first.stderr
    assert "validation: no findings" in first.stdout
    assert "not compared with its manifests" not in first.stdout
    dataset, run_dir = folder / "dataset", folder / "run"
    original = digest(dataset)

    flip(dataset / "context_audio/recording.000001.tar")
    flip(dataset / "codes_tiny/target_codes/codes.000002.tar")
    (dataset / "shards.jsonl").write_bytes((dataset / "shards.jsonl").read_bytes()[:-20])
    found = run_sharmill("validate", dataset, "--json", report, "--against", corpus.manifest, "--rejects",
                     run_dir / "rejects.jsonl")  # fmt: skip
    assert found.returncode == 3, found.stderr
    # Without a readable index the checksums are not known: it comes first, then the rest.
    assert [(unit["stage"], unit["shard"]) for unit in json.loads(report.read_bytes())["redo"]] == [("index", None)]
    again = run_sharmill("run", config, "--redo", report)
    assert again.returncode == 3, again.stderr
    found = run_sharmill("validate", config, "--json", report)
    assert found.returncode == 3, found.stderr
    assert "wrong_checksum" in found.stdout
    assert "to be done again by --redo: 1 of assemble/tiny, 1 of write" in found.stdout
    again = run_sharmill("run", config, "--redo", report)
    assert again.returncode == 0, again.stderr
    assert "validation: no findings" in again.stdout
    assert digest(dataset) == original


def test_levels_are_chosen_by_options_and_by_the_configuration(make_config, encodec, tmp_path):
    config = make_config(tmp_path / "project", validate={"deep": True, "recheck_codes": "50%"})
    assert run_sharmill("run", config, "prepare", "match", "write", "encode").returncode == 0
    report = tmp_path / "report.json"
    dataset = yaml.safe_load(config.read_text())["dataset_dir"]
    # A configuration names its models itself; no model is loaded because a dataset names it.
    by_dataset = run_sharmill("validate", dataset, "--recheck-codes", "50%")
    assert by_dataset.returncode == 2
    assert "--codec-model tiny=MODEL" in by_dataset.stderr
    model = f"tiny=transformers:{encodec}"
    checked = run_sharmill("validate", config, "--codec-model", model, "--json", report)
    assert checked.returncode == 0, checked.stderr
    counts = json.loads(report.read_bytes())["checked"]
    assert counts["items decoded"] == 2 * counts["cuts"]
    assert counts["segments encoded again"] > 0
    assert counts["codes that differ"] / counts["codes compared"] < 0.01
    for options in (["--recheck-codes", "many"], ["--recheck-codes", "200%"], ["--codec-model", "tiny"],
                    ["--rejects", "x"], ["--codec-model", "other=builtin", "--recheck-codes", "1"]):  # fmt: skip
        refused = run_sharmill("validate", dataset, *options)
        assert (refused.returncode, refused.stdout.strip()) == (2, ""), refused.stdout
        assert refused.stderr.startswith("Error: "), refused.stderr


def test_an_index_is_made_again_by_its_command(make_config, tmp_path):
    config = make_config(tmp_path / "project")
    assert run_sharmill("run", config).returncode == 0
    dataset = tmp_path / "project/dataset"
    original = digest(dataset)
    (dataset / "shards.jsonl").unlink()
    assert run_sharmill("validate", dataset).returncode == 3
    made = run_sharmill("index", dataset)
    assert made.returncode == 0, made.stderr
    assert "the fields cuts, target_audio, context_audio, codes_tiny/context_codes" in made.stdout.replace("\n", " ")
    assert digest(dataset) == original
    (dataset / "dataset.json").unlink()
    refused = run_sharmill("index", dataset)
    assert refused.returncode == 2
    assert "codebook_size" in refused.stderr
    assert "'tiny'" in refused.stderr
