"""The checker on datasets without contexts: a sound one, one whose index lies about contexts, and its accounts."""

from __future__ import annotations

import json

import pytest
from support.shar import ToyCodec, copy, lines, reindex, rewrite, run, snapshot

from sharmill.engine.rundir import RunDir
from sharmill.shar.index import read_dataset
from sharmill.shar.rebuild import rebuild_index
from sharmill.sources.nemo import NemoSource
from sharmill.validate.accounts import ExpectedRecords
from sharmill.validate.stage import ValidateStage


@pytest.fixture(autouse=True)
def toy_codec(monkeypatch):
    monkeypatch.setattr("sharmill.models.recorded.load_codec", lambda model, **trust: ToyCodec())


@pytest.fixture
def dataset(without_contexts, tmp_path):
    return copy(without_contexts.dataset, tmp_path / "dataset")


def check(dataset, **options):
    stage = ValidateStage(dataset, RunDir(dataset.with_name("check")), **options)
    assert run(stage).ok
    return stage


def found(dataset):
    return {(f.code, f.shard, f.field) for f in check(dataset).findings()}


def describe(dataset, **changes):
    """Change keys of ``dataset.json``."""
    path = dataset / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add_context_keys(dataset):
    path = dataset / "cuts/cuts.000000.jsonl.gz"
    cuts = lines(path)
    cuts[0]["supervisions"][0]["custom"]["context_speaker_similarity"] = 0.9
    rewrite(path, cuts)
    reindex(dataset)


def test_a_sound_one_is_checked_at_every_level_and_accounted_for(without_contexts, dataset):
    sources = (NemoSource(manifest=str(without_contexts.folder / "small.json"), audio_root="."),)
    rejects = (str(without_contexts.run_dir / "prepare/rejects.jsonl"),)
    against = ExpectedRecords(sources=sources, rejects=rejects)
    report = check(dataset, deep=True, recheck_codes=1.0, against=against).report()
    assert report.findings == []
    assert report.unchecked == []
    assert report.checked["items decoded"] == report.checked["segments encoded again"] == 7
    assert (report.checked["records found as cuts"], report.checked["records not found"]) == (7, 0)


def test_a_context_field_in_the_description_is_found(dataset):
    describe(dataset, fields=["cuts", "target_audio", "context_audio", "codes_toy/target_codes"])
    missing = {("missing_field", shard, "context_audio") for shard in range(3)}
    assert found(dataset) == {("wrong_totals", None, None)} | missing


@pytest.mark.parametrize("lie", [{"context_seconds": 1.0}, {"limits": {"min_similarity": 0.5}}])
def test_seconds_and_limits_of_contexts_that_are_not_there_are_found(dataset, lie):
    describe(dataset, **lie)
    assert found(dataset) == {("wrong_totals", None, None)}


def test_context_keys_of_a_cut_are_found(dataset):
    add_context_keys(dataset)
    assert found(dataset) == {("bad_cut", 0, "cuts")}


def test_a_dataset_with_contexts_cannot_pass_for_one_without(built, tmp_path):
    """Its description says so everywhere; the files and ``shards.jsonl`` still have contexts."""
    dataset = copy(built.dataset, tmp_path / "dataset")
    described = json.loads((dataset / "dataset.json").read_text())
    fields = [field for field in described["fields"] if "context" not in field]
    describe(dataset, fields=fields, limits={}, context_seconds=0.0)
    unnamed = {("wrong_totals", s, f) for s in range(3) for f in ("context_audio", "codes_toy/context_codes")}
    assert found(dataset) == {("wrong_totals", None, None)} | unnamed
    # With an index that does not name the files either.
    shards = lines(dataset / "shards.jsonl")
    for shard in shards:
        shard["context_seconds"] = 0.0
        shard["fields"] = {field: file for field, file in shard["fields"].items() if "context" not in field}
    rewrite(dataset / "shards.jsonl", shards)
    assert found(dataset) == {("stray_file", None, None)} | {("bad_cut", shard, "cuts") for shard in range(3)}


def test_a_codec_with_codes_of_contexts_is_found(dataset):
    describe(dataset, fields=["cuts", "target_audio", "codes_toy/target_codes", "codes_toy/context_codes"])
    codes = {("missing_field", shard, "codes_toy/context_codes") for shard in range(3)}
    assert found(dataset) == {("wrong_totals", None, None)} | codes


def test_the_index_made_again_does_not_believe_a_description_that_lies(dataset):
    before = snapshot(dataset)
    describe(dataset, fields=["cuts", "target_audio", "context_audio", "codes_toy/target_codes"], context_seconds=3.0)
    list(rebuild_index(dataset))
    assert snapshot(dataset) == before


def test_a_dataset_whose_contexts_were_removed_is_nobodys_any_more(built, tmp_path):
    import shutil

    dataset = copy(built.dataset, tmp_path / "dataset")
    for folder in ("context_audio", "codes_toy/context_codes"):
        shutil.rmtree(dataset / folder)
    assert any("without" in line for line in rebuild_index(dataset))
    record = read_dataset(dataset)
    assert (record.contract, record.limits, record.has_contexts) == ("foreign", {}, False)
    assert found(dataset) == set()
