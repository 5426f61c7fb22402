"""Datasets without contexts (``match: null``): prepare, write and encode, and what becomes of the kind of a dataset."""

from __future__ import annotations

import numpy as np
import pytest
from support.errors import raises
from support.manifests import speaker_tag
from support.shar import Project, ToyCodec, lines, run, snapshot, voice

from sharmill.errors import ConfigError
from sharmill.grow.merge import merge_datasets
from sharmill.manifest import CONTEXT_KEYS
from sharmill.pipeline import check_config, make_stages, run_dataset
from sharmill.prepare.stage import PrepareStage
from sharmill.shar import open_shar
from sharmill.shar.index import read_dataset
from sharmill.write.stage import WriteStage

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


def test_the_audio_is_the_same_as_in_a_dataset_with_contexts(project, tmp_path):
    fill(project)
    project.write(match={"min_duration": 0.0}, write=NONE["write"])
    with_contexts = snapshot(project.dataset / "target_audio")
    project.run_dir, project.dataset = tmp_path / "run2", tmp_path / "dataset2"
    project.write(**NONE)
    assert snapshot(project.dataset / "target_audio") == with_contexts


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


def test_order_by_speaker_is_by_the_speaker_of_the_tag(project):
    for number, speaker in enumerate("abcabca"):
        project.add(f"{number}.wav", voice(0.3, seed=number), number=number, speaker=speaker)
    project.records[3]["speaker"] = None
    project.write(match=None, write={"order": "speaker"})
    assert [custom["number"] for custom in customs(project)] == [0, 6, 1, 4, 2, 5, 3]


def test_no_speaker_encoder_is_looked_for(project):
    fill(project)
    config = project.configure(**NONE)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("encoder_family", "min_similarity"):
            patch.setattr(f"sharmill.match.stage.{name}", None)
        check_config(config)
    names = " ".join(stage.name for stage in make_stages(config))
    assert names == "prepare write survey encode/builtin assemble/builtin validate"


def test_the_stage_match_is_refused(project):
    from sharmill.engine.listener import Listener

    fill(project)
    config = project.configure(**NONE)
    for refused in (
        lambda: check_config(config, ["match"]),
        lambda: make_stages(config, ["prepare", "match"]),
        lambda: run_dataset(config, Listener(), stages=["match"]),
    ):
        with raises(ConfigError, "unknown_stage", "match is null", "prepare, write, survey, encode, assemble"):
            refused()
    assert not project.run_dir.exists()


def test_write_needs_prepare(project):
    fill(project)
    with raises(ConfigError, "stage_not_run", "run the stage prepare first"):
        WriteStage(project.configure(**NONE)).identity()


def test_only_targets_have_codes(project):
    fill(project)
    config = project.write(**NONE)
    project.encode(config)
    assert sorted(path.name for path in (project.dataset / "codes_toy").iterdir()) == ["target_codes"]
    assert read_dataset(project.dataset).fields == ["cuts", "target_audio", "codes_toy/target_codes"]
    for cut in open_shar(project.dataset):
        assert cut.load_target_codes().shape[1] == np.ceil(cut.duration * 50)
        assert not cut.has_custom("context_codes")


def test_a_run_with_another_configuration_adds_codes_as_the_dataset_asks(project, tmp_path):
    """Its ``match`` is the default one: the dataset itself says whether it has contexts."""
    fill(project)
    config = project.write(**NONE)
    project.encode(config)
    before = snapshot(project.dataset)
    project.run_dir = tmp_path / "run2"
    other = project.configure()
    project.encode(other, "second", ToyCodec(samples_per_frame=160))
    dataset = read_dataset(project.dataset)
    assert dataset.fields == ["cuts", "target_audio", "codes_second/target_codes", "codes_toy/target_codes"]
    after = snapshot(project.dataset)
    index = {"dataset.json", "shards.jsonl"}
    assert {name: data for name, data in after.items() if name in before and name not in index} == {
        name: data for name, data in before.items() if name not in index
    }


@pytest.mark.parametrize("first", [True, False])
def test_a_restart_changes_the_kind_of_a_dataset_and_leaves_nothing_behind(project, first):
    fill(project)
    kinds = [{"match": {"min_duration": 0.0}, "write": NONE["write"]}, NONE]
    before, after = kinds if first else reversed(kinds)
    config = project.write(**before)
    project.encode(config)
    config = project.configure(**after)
    for stage in (PrepareStage(config), WriteStage(config)):
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


def test_datasets_without_contexts_are_merged_with_their_like_only(without_contexts, built, tmp_path):
    merged = merge_datasets([without_contexts.dataset, dataset_of_another_cut(tmp_path)], tmp_path / "out")
    assert merged.record.num_cuts == 8
    assert merged.record.fields == ["cuts", "target_audio", "codes_toy/target_codes"]
    with pytest.raises(ConfigError, match="context_audio"):
        merge_datasets([without_contexts.dataset, built.dataset], tmp_path / "mixed")


def dataset_of_another_cut(folder):
    """A dataset of one other cut, with the same codec."""
    project = Project(folder / "other")
    project.add("other.wav", voice(0.5, seed=99))
    project.encode(project.write(match=None))
    return project.dataset
