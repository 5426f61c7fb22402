"""Fields that a stage has added go along when datasets are merged, split and appended to, without what made them."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.errors import raises
from support.fields import SCORE, VOICE, add_fields, require_fields
from support.shar import copy, run, snapshot
from support.sudden_end import killed_at

from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.grow.append import append_dataset
from sharmill.grow.merge import merge_datasets
from sharmill.grow.split import split_dataset
from sharmill.shar.index import read_dataset, write_dataset
from sharmill.validate.stage import ValidateStage


@pytest.fixture
def datasets(coded, tmp_path):
    """Two datasets with the codec a, a score that may be missing, and an array."""
    return [add_fields(copy(dataset, tmp_path / dataset.parent.name)) for dataset in coded]


def require_whole(dataset):
    """Assert that the checker has no findings; return the number of cuts, all of which have their values."""
    stage = ValidateStage(dataset, RunDir(dataset.with_name(f"{dataset.name}.checks")))
    run(stage, restart=True)
    assert stage.findings() == []
    assert [field.name for field in read_dataset(dataset).added_fields] == ["score", "voices/voice"]
    return require_fields(dataset)


def test_they_are_merged(datasets, tmp_path):
    merge_datasets(datasets, tmp_path / "out")
    assert require_whole(tmp_path / "out") == 4 + 6


def test_they_are_appended(datasets):
    one, other = datasets
    append_dataset(one, other)
    assert require_whole(one) == 4 + 6


def test_a_killed_append_is_done_again(datasets):
    one, other = datasets
    before = snapshot(one)
    assert killed_at(20, lambda: append_dataset(one, other), below=str(one))
    left = snapshot(one).keys() - before.keys()
    assert {name for name in left if name.startswith(("score/", "voices/voice/"))}
    assert require_fields(one) == 4
    append_dataset(one, other)
    assert require_whole(one) == 4 + 6


def test_they_are_split(datasets, tmp_path):
    made = split_dataset(datasets[1], tmp_path / "out", {"valid": 0.3}, workers=1, shard_size=2)
    assert sum(require_whole(tmp_path / "out" / part.name) for part in made) == 6


def test_a_dataset_without_them_is_not_merged_with_one_that_has_them(coded, datasets, tmp_path):
    with raises(ConfigError, "unlike_datasets", "fields differ"):
        merge_datasets([datasets[0], coded[1]], tmp_path / "out")


def test_fields_of_other_limits_are_not_merged(datasets, tmp_path):
    record = read_dataset(datasets[1])
    layout = [msgspec.structs.replace(field, limits=(0, 5)) if field.name == SCORE.name else field
              for field in record.layout]  # fmt: skip
    write_dataset(datasets[1], msgspec.structs.replace(record, layout=layout))
    with raises(ConfigError, "unlike_datasets", "limits of the field 'score' differ"):
        merge_datasets(datasets, tmp_path / "out")


def test_a_dataset_of_the_format_without_a_layout_grows_by_one_with_a_layout(coded, tmp_path):
    old = copy(coded[0], tmp_path / "old")
    content = json.loads((old / "dataset.json").read_text())
    assert content.pop("layout")
    (old / "dataset.json").write_text(json.dumps(content))
    append_dataset(old, coded[1])
    assert len(read_dataset(old).layout) == 5
    assert VOICE.name not in read_dataset(old).fields
    assert read_dataset(old).num_cuts == 4 + 6
