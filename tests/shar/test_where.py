"""Conditions on columns: ``open_shar(where=...)``, its counts, its errors, and resuming with it."""

import json
import logging
import shutil

import pytest
from support.fields import add_fields, score_of
from support.project import make_bare_dataset, raises, reindex

from sharmill.comparisons import parse_where
from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.sidecars import write_sidecars

WHERE = "score > 0.3 and score <= 0.8"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("where") / "dataset"
    make_bare_dataset(directory, [7, 5, 9])
    reindex(directory)
    return add_fields(directory)


@pytest.fixture(scope="module")
def passing(dataset):
    """The ids of all cuts that meet WHERE, in the order of the dataset."""
    ids = [cut.id for cut in open_shar(dataset)]
    found = [id for id in ids if (score_of(id) or 0.0) > 0.3 and score_of(id) <= 0.8]
    assert 3 < len(found) < len(ids) - 3
    return found


@pytest.mark.parametrize("options", [{}, {"fields": []}, {"fields": ["score"]}, {"decode_threads": 2}])
def test_cuts_that_meet_it_are_read_and_the_others_counted(dataset, passing, options, caplog):
    cuts = open_shar(dataset, where=WHERE, **options)
    with caplog.at_level(logging.WARNING):
        read = list(cuts)
    assert [cut.id for cut in read] == passing
    assert cuts.data.num_left_out == 21 - len(passing)
    assert (
        f"{21 - len(passing)} cuts were left out because they do not meet score > 0.3 and score <= 0.8" in caplog.text
    )
    assert all(("score" in (cut.custom or {})) == (options.get("fields") != []) for cut in read)


@pytest.mark.parametrize("shuffle", [True, "global"])
def test_ranks_share_them_through_a_resume(dataset, passing, shuffle, tmp_path):
    if shuffle == "global":
        write_sidecars(dataset, tmp_path / "sidecars")
    options = {"where": WHERE, "shuffle": shuffle, "seed": 3, "world_size": 2, "block_size": 1}
    options |= {"sidecars": tmp_path / "sidecars"} if shuffle == "global" else {}
    seen = []
    for rank in range(2):
        first = open_shar(dataset, rank=rank, **options)
        iterator = iter(first)
        seen.append(next(iterator).id)
        state = json.loads(json.dumps(first.data.state_dict()))
        second = open_shar(dataset, rank=rank, **options)
        second.data.load_state_dict(state)
        seen += [cut.id for cut in second]
    assert sorted(seen) == sorted(passing)


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("duration >= 0", 21),
        ("duration < 0", 0),
        ("duration >= 0 and score >= -1", 14),  # a cut without a score meets no condition on it
        ("score != 2", 14),
        ("score == 'high'", 0),
    ],
)
def test_what_has_no_value_or_another_type_does_not_meet_it(dataset, where, number):
    scored = sum(score_of(cut.id) is not None for cut in open_shar(dataset))
    assert len(list(open_shar(dataset, where=where))) == (scored if number == 14 else number)


@pytest.mark.parametrize(
    ("where", "code", "words"),
    [
        ("scor > 1", "unknown_field", "did you mean 'score'"),
        ("voice > 1", "unknown_field", "no column 'voice'"),
        ("score >", "bad_config_value", "cannot be parsed from 'score >' on"),
        ("score > 1 and", "bad_config_value", "cannot be parsed from"),
        ("score > 1 or score < 0", "bad_config_value", "join comparisons with 'and'"),
        ("__import__('os')", "bad_config_value", "comparisons"),
    ],
)
def test_a_condition_that_cannot_be_used_is_one_line(dataset, where, code, words):
    with raises(ConfigError, code, words):
        open_shar(dataset, where=where)


def test_equal_numbers_of_cuts_cannot_be_promised(dataset):
    with raises(ConfigError, "bad_config_value", "do not meet score > 0.3"):
        open_shar(dataset, where="score > 0.3", tail="drop")


def test_a_damaged_column_is_an_error(dataset, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    (copy / "score/score.000001.jsonl.gz").write_bytes(b"")
    with pytest.raises(DamagedShard):
        list(open_shar(copy, [], where=WHERE))


def test_texts_may_contain_anything():
    (one, other) = parse_where("""kind == 'read and "spoken"' and note != "it's" """)
    assert (one.limit, other.limit) == ('read and "spoken"', "it's")
    assert one.fault('read and "spoken"') == "" != one.fault("read")
