"""Fields that a stage has added: checked by what the dataset says of them, with no plug-in that made them."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from support.fields import SCORE, VOICE, add_fields, score_of, voice_of, write_shard
from support.shar import copy, reindex, run

from sharmill.engine.rundir import RunDir
from sharmill.shar.cut_lines import read_cut_ids, read_cuts, write_cuts
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.index import read_dataset, write_dataset
from sharmill.validate.stage import ValidateStage

SCORES, VOICES = SCORE.path(1), VOICE.path(1)


@pytest.fixture
def dataset(finished, tmp_path):
    return add_fields(copy(finished / "dataset", tmp_path / "dataset"))


def findings(dataset):
    stage = ValidateStage(dataset, RunDir(dataset.with_name("checks")), deep=True)
    run(stage, restart=True)
    return stage.findings()


def found(dataset):
    """Code, shard, field and member of each finding."""
    return [(finding.code, finding.shard, finding.field, finding.member) for finding in findings(dataset)]


def write(dataset, scores=None, voices=None):
    """Write the fields of shard 1 anew, with other values for some cuts, and the index of what was written."""
    ids = list(read_cut_ids(dataset / "cuts/cuts.000001.jsonl.gz"))
    all_scores = [(scores or {}).get(number, score_of(cut_id)) for number, cut_id in enumerate(ids)]
    all_voices = [(voices or {}).get(number, voice_of(cut_id)) for number, cut_id in enumerate(ids)]
    files = write_shard(dataset, 1, ids, all_scores, all_voices)
    shards = [shard.fields for shard in ShardedDataset(dataset).shards()]
    shards[1] = shards[1] | files
    names = (SCORE.name, VOICE.name)
    ShardedDataset(dataset).add_fields([SCORE, VOICE], [{name: files[name] for name in names} for files in shards])
    return ids


def test_a_whole_dataset_has_no_findings(dataset):
    assert found(dataset) == []


@pytest.mark.parametrize("attribute", ["voice", "target_audio", "split"])
def test_an_attribute_of_two_fields_or_of_a_method_is_found(dataset, attribute):
    record = read_dataset(dataset)
    layout = [
        msgspec.structs.replace(field, attribute=attribute) if field.name == SCORE.name else field
        for field in record.layout
    ]
    write_dataset(dataset, msgspec.structs.replace(record, layout=layout))
    codes = [(finding.code, attribute in finding.sentence) for finding in findings(dataset)]
    assert ("wrong_totals", True) in codes


@pytest.mark.parametrize("value", [1.5, -0.1, "0.5", True, [0.5], {"id": 1}])
def test_a_value_that_is_no_number_within_the_limits_is_found(dataset, value):
    ids = write(dataset, scores={1: value})
    assert found(dataset) == [("bad_value", 1, "score", ids[1])]


@pytest.mark.parametrize(
    "array",
    [np.full(4, 2, np.float32), np.full(4, np.nan, np.float32), np.array(["a", "b"]), None],
    ids=["outside", "not finite", "text", "missing"],
)
def test_an_array_that_is_not_as_the_field_says_is_found(dataset, array):
    ids = write(dataset, voices={2: array})
    assert found(dataset) == [("bad_value", 1, "voices/voice", ids[2])]


def test_a_value_that_must_not_be_missing_is_found(dataset):
    ids = write(dataset, scores={0: 0.5, 1: 0.5, 2: None})
    assert found(dataset) == []
    record = read_dataset(dataset)
    strict = [msgspec.structs.replace(field, optional=False) if field.name == "score" else field
              for field in record.layout]  # fmt: skip
    write_dataset(dataset, msgspec.structs.replace(record, layout=strict))
    missing = {
        cut_id
        for shard in (0, 2)
        for cut_id in read_cut_ids(dataset / f"cuts/cuts.{shard:06d}.jsonl.gz")
        if score_of(cut_id) is None
    }
    assert {row[3] for row in found(dataset) if row[0] == "bad_value"} == {*missing, ids[2]}


def _without_last(dataset):
    write_cuts(dataset / SCORES, list(read_cuts(dataset / SCORES))[:-1])


def _exchanged(dataset):
    first, *rest = read_cuts(dataset / SCORES)
    write_cuts(dataset / SCORES, [*rest, first])


def _other_key(dataset):
    ids = [line["cut_id"] for line in read_cuts(dataset / SCORES)]
    write_cuts(dataset / SCORES, [{"cut_id": cut_id, "rating": 1} for cut_id in ids])


def _cut_off(dataset):
    (dataset / SCORES).write_bytes((dataset / SCORES).read_bytes()[:-9])


@pytest.mark.parametrize(
    ("damage", "codes"),
    [
        (_without_last, {"wrong_count"}),
        (_exchanged, {"wrong_id"}),
        (_other_key, {"bad_value"}),
        (_cut_off, {"damaged"}),
    ],
)
def test_damaged_lines_are_found_by_their_content_and_by_the_index(dataset, damage, codes):
    damage(dataset)
    by_index = found(dataset)
    assert {row[:3] for row in by_index} >= {("wrong_size", 1, "score")} or by_index[0][0] == "wrong_checksum"
    reindex(dataset)
    assert {(row[0], row[1], row[2]) for row in found(dataset)} == {(code, 1, "score") for code in codes}


def test_a_missing_file_and_one_that_is_not_listed_are_found(dataset):
    (dataset / VOICES).unlink()
    (dataset / "score/score.000007.jsonl.gz").write_bytes(b"")
    assert {row[:3] for row in found(dataset)} == {("missing_file", 1, "voices/voice"), ("stray_file", None, None)}


def test_a_field_that_no_layout_describes_is_found(dataset):
    path = dataset / "dataset.json"
    content = json.loads(path.read_text())
    content["layout"] = [field for field in content["layout"] if field["name"] != "score"]
    path.write_text(json.dumps(content))
    assert {row[0] for row in found(dataset)} == {"wrong_totals"}


def test_a_dataset_of_the_format_without_a_layout_has_no_findings(finished, tmp_path):
    dataset = copy(finished / "dataset", tmp_path / "dataset")
    path = dataset / "dataset.json"
    content = json.loads(path.read_text())
    del content["layout"]
    path.write_text(json.dumps(content))
    assert found(dataset) == []
