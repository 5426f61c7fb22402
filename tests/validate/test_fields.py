"""Fields added by a stage: checked against their declaration, without the plug-in that made them."""

import msgspec
import numpy as np
import pytest
from support import damage as do
from support.fields import SCORE, VOICE, add_fields, score_of, voice_of, write_shard
from support.project import check_dataset, copy, reindex

from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.index import read_dataset, write_dataset
from sharmill.shar.json_lines import read_cut_ids

SCORES = SCORE.path(1)


@pytest.fixture
def dataset(finished, tmp_path):
    return add_fields(copy(finished / "dataset", tmp_path / "dataset"))


def found(dataset):
    """Return code, shard, field and member of each finding."""
    report = check_dataset(dataset, dataset.with_name("checks"), deep=True)
    return [(row["code"], row["shard"], row["field"], row["member"]) for row in report.findings]


def write(dataset, scores=None, voices=None):
    """Write the fields of shard 1 again, with other values for some cuts, and a matching index."""
    ids = list(read_cut_ids(dataset / "cuts/cuts.000001.jsonl.gz"))
    all_scores = [(scores or {}).get(number, score_of(cut_id)) for number, cut_id in enumerate(ids)]
    all_voices = [(voices or {}).get(number, voice_of(cut_id)) for number, cut_id in enumerate(ids)]
    files = write_shard(dataset, 1, ids, all_scores, all_voices)
    shards = [shard.fields for shard in ShardedDataset(dataset).shards()]
    shards[1] = shards[1] | files
    names = (SCORE.name, VOICE.name)
    ShardedDataset(dataset).add_fields([SCORE, VOICE], [{name: files[name] for name in names} for files in shards])
    return ids


@pytest.mark.parametrize("attribute", ["voice", "target_audio", "split"])
def test_an_attribute_of_two_fields_or_of_a_method_is_found(dataset, attribute):
    record = read_dataset(dataset)
    layout = [
        msgspec.structs.replace(field, attribute=attribute) if field.name == SCORE.name else field
        for field in record.layout
    ]
    write_dataset(dataset, msgspec.structs.replace(record, layout=layout))
    rows = check_dataset(dataset, dataset.with_name("checks")).findings
    assert ("wrong_totals", True) in [(row["code"], attribute in row["sentence"]) for row in rows]


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


@pytest.mark.parametrize(
    ("damage", "codes"),
    [
        (do.change_cuts(SCORES, lambda rows: rows[:-1]), {"wrong_count"}),
        (do.change_cuts(SCORES, lambda rows: [*rows[1:], rows[0]]), {"wrong_id"}),
        (do.change_cuts(SCORES, lambda rows: [{"cut_id": row["cut_id"], "rating": 1} for row in rows]), {"bad_value"}),
        (do.change_bytes(SCORES, lambda data: data[:-9]), {"damaged"}),
    ],
)
def test_damaged_lines_are_found_by_content_and_by_index(dataset, damage, codes):
    damage(dataset)
    by_index = found(dataset)
    assert {row[:3] for row in by_index} >= {("wrong_size", 1, "score")} or by_index[0][0] == "wrong_checksum"
    reindex(dataset)
    assert {(row[0], row[1], row[2]) for row in found(dataset)} == {(code, 1, "score") for code in codes}
