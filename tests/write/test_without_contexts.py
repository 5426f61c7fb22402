"""Datasets without contexts (``match: null``): prepare, write, encode, and changes of the kind of a dataset."""

import pytest
from support.project import lines, raises, run, speaker_tag, stage_of, voice

from sharmill.errors import ConfigError
from sharmill.manifest import CONTEXT_KEYS
from sharmill.shar.index import read_dataset

NONE = {"match": None, "write": {"shard_size": 2, "order": "manifest"}}


def fill(project, count=3, **keys):
    for number in range(count):
        project.add(f"{number}.wav", voice(0.3 + 0.1 * number, seed=number), number=number, **keys)


def customs(project):
    files = sorted((project.dataset / "cuts").iterdir())
    return [cut["supervisions"][0]["custom"] for file in files for cut in lines(file)]


def test_the_dataset_has_cuts_and_target_audio_only(project):
    fill(project)
    project.write(**NONE)
    names = sorted(path.name for path in project.dataset.iterdir())
    assert names == ["cuts", "dataset.json", "shards.jsonl", "target_audio"]
    dataset = read_dataset(project.dataset)
    assert dataset.fields == ["cuts", "target_audio"]
    assert (dataset.limits, dataset.context_seconds, dataset.num_cuts) == ({}, 0.0, 3)
    assert dataset.target_seconds == pytest.approx(1.2)
    assert not dataset.has_contexts
    shards = lines(project.dataset / "shards.jsonl")
    assert [(shard["count"], shard["context_seconds"], sorted(shard["fields"])) for shard in shards] == [
        (2, 0.0, ["cuts", "target_audio"]),
        (1, 0.0, ["cuts", "target_audio"]),
    ]


@pytest.mark.parametrize("key", ["speaker", "nvyt2505", "librispeech"])
def test_records_without_speaker_are_accepted_whatever_the_key(project, key):
    fill(project)
    project.records[0]["speaker"] = None
    project.records[1]["speaker"] = "Anna"
    project.write(speaker_key=key, **NONE)
    assert project.rejects("prepare") == []
    names = [custom["speaker"] for custom in customs(project)]
    assert names == [
        "| Language:und Dataset:small Speaker:unknown |",
        "| Language:und Dataset:small Speaker:Anna |",
        speaker_tag("anna"),
    ]


def test_a_context_that_the_manifest_had_is_not_kept(project):
    fill(project, 1, context_audio_filepath="x.wav", context_speaker_similarity=0.9, context_audio_duration="long")
    project.write(**NONE)
    (custom,) = customs(project)
    assert not custom.keys() & set(CONTEXT_KEYS)
    assert custom["number"] == 0


@pytest.mark.parametrize("first", [True, False])
def test_a_restart_with_other_contexts_leaves_no_old_files(project, first):
    fill(project)
    kinds = [{"match": {"min_duration": 0.0}, "write": NONE["write"]}, NONE]
    before, after = kinds if first else reversed(kinds)
    config = project.write(**before)
    project.encode(config)
    config = project.configure(**after)
    for stage in (stage_of(config, "prepare"), stage_of(config, "write")):
        if config.has_contexts and stage.kind == "write":
            project.match_by_hand(config)
        with raises(ConfigError, "changed_plan"):
            run(stage)
        assert run(stage, restart=True).ok
    project.encode(config)
    contexts = {"context_audio", "codes_toy/context_codes"} if config.has_contexts else set()
    stored = {"cuts", "target_audio", "codes_toy/target_codes"} | contexts
    assert set(read_dataset(project.dataset).fields) == stored
    files = {path.parent.relative_to(project.dataset).as_posix() for path in project.dataset.rglob("*.*")} - {"."}
    assert files == stored
