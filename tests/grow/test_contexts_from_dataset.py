"""Contexts of appended records from the dataset that they are appended to."""

from __future__ import annotations

import numpy as np
import pytest
from support.errors import raises
from support.paths import TESTS
from support.shar import Project, voice

from sharmill.engine.listener import Listener
from sharmill.errors import ConfigError
from sharmill.grow.append import append_dataset
from sharmill.pipeline import check_config, run_dataset
from sharmill.shar import open_shar
from sharmill.shar.dataset import ShardedDataset

VALUES = {
    "match": {"encoder": "python:tiny_speech:TinyEncoder", "min_similarity": -1.0, "min_duration": 0.0},
    "encode": {"codecs": []}, "executor": {"workers": 1}, "max_reject_fraction": 1.0,
    "validate": {"deep": True, "against_sources": True},
}  # fmt: skip


@pytest.fixture
def grown(tmp_path, monkeypatch):
    """Returns a function: changes of match -> the finished project of the new records, and the dataset that grew.

    The dataset has two cuts of anna and two of bert. Of the new records one is of anna, one of carl and two, of
    one file that the dataset has a part of, are of bert.
    """
    monkeypatch.syspath_prepend(str(TESTS / "support/plugin"))

    def make(**match):
        values = VALUES | {"match": VALUES["match"] | match}
        old, new = Project(tmp_path / "old"), Project(tmp_path / "new")
        new.root = old.root
        new.folder.mkdir()
        for number, speaker in enumerate(("anna", "anna", "bert", "bert")):
            old.add(f"{speaker}/{number}.flac", voice(1.0 + 0.05 * number, seed=number), speaker=speaker)
        old.records[3] |= {"offset": 0.0, "duration": 0.6}
        new.add("anna/new.flac", voice(0.5, seed=10), speaker="anna")
        new.add("carl/new.flac", voice(0.5, seed=11), speaker="carl")
        new.records.append(old.records[3] | {"offset": 0.5, "duration": 0.4, "text": "overlaps"})
        new.records.append(old.records[3] | {"offset": 0.7, "duration": 0.3, "text": "does not overlap"})
        plain = VALUES | {"match": {k: v for k, v in values["match"].items() if k != "contexts_from_dataset"}}
        assert run_dataset(old.configure(**plain), Listener()).ok
        config = new.configure(**values, append_to=str(old.dataset))
        assert run_dataset(config, Listener()).num_errors == 0
        return new, old.dataset, config

    return make


def contexts(project):
    """The text of each cut, and where its context came from."""
    found = [cut.supervisions[0] for cut in open_shar(project.dataset, [])]
    return {said.text: said.custom["context_audio_filepath"] for said in found}


def test_contexts_are_those_of_new_records_unless_asked(grown):
    new, _, _ = grown()
    assert {reject["reason"] for reject in new.rejects("match")} == {"single_utterance_speaker", "no_long_context"}
    assert contexts(new) == {}


@pytest.mark.parametrize("max_group", [None, 3])
def test_contexts_are_also_old_cuts_with_their_stored_audio(grown, max_group):
    new, dataset, config = grown(contexts_from_dataset=True, max_group=max_group)
    old = {cut.supervisions[0].custom["audio_filepath"]: cut for cut in open_shar(dataset)}
    found = contexts(new)
    assert [r["record"]["text"] for r in new.rejects("match") if r["reason"] == "single_utterance_speaker"] == [
        "text of carl/new.flac"
    ]
    # With max_group, a part may have no other utterance.
    if max_group is None:
        assert found["text of anna/new.flac"] in ("anna/0.flac", "anna/1.flac")
        assert found["overlaps"] == "bert/2.flac"
        assert set(found) == {"text of anna/new.flac", "overlaps", "does not overlap"}
    for cut in open_shar(new.dataset):
        said = cut.supervisions[0].custom
        if said["context_audio_filepath"] in old and said["context_audio_duration"] != 0.3:
            stored = old[said["context_audio_filepath"]]
            np.testing.assert_array_equal(cut.load_context_audio(), stored.load_target_audio())
            assert said["context_audio_text"] == stored.supervisions[0].text
    before = len(old)
    appended = append_dataset(dataset, new.dataset)
    assert ShardedDataset(dataset).record().num_cuts == appended.record.num_cuts == before + len(found)
    assert len(list(open_shar(dataset))) == before + len(found)
    # What has been appended does not change the plan, so that the run is as it was.
    assert run_dataset(config, Listener()).num_errors == 0
    assert append_dataset(dataset, new.dataset).already


def test_contexts_from_a_dataset_need_a_dataset_to_append_to(tmp_path):
    project = Project(tmp_path)
    project.add("a.flac", voice(0.5))
    with raises(ConfigError, "bad_config_value", "needs append_to"):
        check_config(project.configure(match={"contexts_from_dataset": True}))
