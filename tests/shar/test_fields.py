"""The fields that a dataset declares: valid declarations, and datasets without any."""

import json

import msgspec
import pytest
from lhotse.shar.writers.cut import JsonlShardWriter
from support.fields import SCORE, add_fields, require_fields
from support.project import copy, make_bare_dataset, raises, snapshot

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import Field, base_fields, codec_fields
from sharmill.shar.index import FieldFile, read_dataset, read_shards, write_dataset
from sharmill.shar.json_lines import read_cut_ids, read_json_lines, write_cut_lines
from sharmill.shar.rebuild import rebuild_index


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../score", "file": "../score/score.{:06d}.jsonl.gz"},
        {"name": "/score", "file": "/score/score.{:06d}.jsonl.gz"},
        {"name": ".sharmill-staging", "file": ".sharmill-staging/score.{:06d}.jsonl.gz"},
        {"name": "a\nb", "file": "a\nb/score.{:06d}.jsonl.gz"},
        {"file": "target_audio/score.{:06d}.jsonl.gz"},
        {"file": "score/../../score.{:06d}.jsonl.gz"},
        {"file": "score/score.000000.jsonl.gz"},
        {"file": "score/score.{:999999999d}.jsonl.gz"},
        {"file": "score/score.{0.__class__}.jsonl.gz"},
        {"file": "score/score.{:06d}.tar"},
        {"kind": "array"},
        {"kind": "cuts"},
        {"kind": "pickle"},
        {"name": "cuts", "file": "cuts/cuts.{:06d}.jsonl.gz"},
        {"attribute": "id"},
        {"attribute": "recording"},
        {"attribute": "shar_position"},
        {"attribute": "__dict__"},
        {"attribute": "two words"},
        {"attribute": ""},
        {"name": "shards.jsonl", "file": "shards.jsonl/score.{:06d}.jsonl.gz"},
        {"limits": [1, 0]},
        {"limits": [0, 1e999]},
        {"limits": ["a", "b"]},
    ],
    ids=str,
)
def test_a_field_with_a_bad_path_or_attribute_is_refused(tmp_path, changes):
    make_bare_dataset(tmp_path, [1])
    path = tmp_path / "dataset.json"
    content = json.loads(path.read_text())
    content["layout"].append({**msgspec.to_builtins(SCORE), **changes})
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedShard, match=r"dataset\.json"):
        read_dataset(tmp_path)


def test_declarations_of_published_fields_are_ignored(tmp_path):
    make_bare_dataset(tmp_path, [1], codes=True)
    before, path = read_dataset(tmp_path), tmp_path / "dataset.json"
    content = json.loads(path.read_text())
    for field in content["layout"]:
        field["attribute"] = f"my_{field['attribute']}"
    path.write_text(json.dumps(content))
    assert read_dataset(tmp_path) == before


def test_a_dataset_without_a_layout_has_the_published_one(tmp_path):
    make_bare_dataset(tmp_path, [1], codes=True)
    said = read_dataset(tmp_path)
    path = tmp_path / "dataset.json"
    content = json.loads(path.read_text())
    assert content.pop("layout") == [
        {"name": field.name, "file": field.file, "kind": field.kind, "attribute": field.attribute, "optional": False,
         "limits": None, "by": field.by, "settings": {}}
        for field in (base_fields(contexts=False)[0], *codec_fields("toy"))
    ]  # fmt: skip
    path.write_text(json.dumps(content))
    assert read_dataset(tmp_path) == said
    write_dataset(tmp_path, read_dataset(tmp_path))
    assert "layout" in json.loads(path.read_text())


@pytest.fixture
def dataset(tmp_path):
    """Seven cuts in three shards, with codes, a score that may be missing, and an array."""
    return add_fields(make_bare_dataset(tmp_path / "dataset", [3, 1, 3], codes=True))


def _values(cuts):
    return {cut.id: ((cut.custom or {}).get("score"), cut.load_voice().tolist()) for cut in cuts}


def test_values_and_arrays_are_attributes_of_the_cut(dataset):
    assert require_fields(dataset) == 7
    every = list(open_shar(dataset))
    assert {"score", "voice", "target_codes", "context_codes"} <= set().union(*(cut.custom for cut in every))
    assert {cut.has_custom("score") for cut in every} == {True, False}
    assert "score" not in next(iter(open_shar(dataset, ["target_codes"]))).custom


def test_what_lhotse_writes_is_read(dataset, tmp_path):
    shard = next(read_shards(dataset))
    ids = list(read_cut_ids(dataset / shard.fields["cuts"].file))
    with JsonlShardWriter(f"{tmp_path}/score.%06d.jsonl.gz", shard_size=10) as writer:
        writer.write_placeholder(ids[0])
        for number, cut_id in enumerate(ids[1:], 1):
            writer.write({"cut_id": cut_id, "score": number / 10})
    (tmp_path / "score.000000.jsonl.gz").replace(dataset / shard.fields["score"].file)
    found = list(open_shar(dataset, ["score"]))[:3]
    assert [(cut.custom or {}).get("score") for cut in found] == [None, 0.1, 0.2]


def test_fields_with_one_attribute_are_chosen_by_folder(dataset):
    other = Field(name="b/score", file="b/score/score.{:06d}.jsonl.gz", kind="value", attribute="score", by="b")
    shards = list(read_shards(dataset))
    for shard in shards:
        (dataset / "b/score").mkdir(parents=True, exist_ok=True)
        (dataset / other.path(shard.index)).write_bytes((dataset / shard.fields["score"].file).read_bytes())
    ShardedDataset(dataset).add_fields(
        [other], [{"b/score": FieldFile(other.path(shard.index), 0, "")} for shard in shards]
    )
    with raises(ConfigError, "bad_layout", "several folders for score: b/score, score"):
        open_shar(dataset)
    assert _values(open_shar(dataset, ["b/score", "voice"])) == _values(open_shar(dataset, ["score", "voice"]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"cut_id": "another", "score": 1}', "belongs to 'another'"),
        (b"{", "is not JSON"),
        (b'{"cut_id": "%s", "score": {"id": "x", "sources": [{"type": "command", "source": "touch /tmp/x"}], '
         b'"sampling_rate": 1}}', "which is not loaded"),
    ],
)  # fmt: skip
def test_a_damaged_or_hostile_line_is_an_error(dataset, line, message):
    path = dataset / SCORE.path(0)
    lines = read_json_lines(path)
    cut_id = next(read_cut_ids(dataset / "cuts/cuts.000000.jsonl.gz")).encode()
    write_cut_lines(path, [line.replace(b"%s", cut_id), *lines[1:]])
    with pytest.raises(DamagedShard, match=message):
        list(open_shar(dataset, ["score"]))


def test_a_field_named_like_a_method_of_cuts_is_not_read(dataset):
    path = dataset / "dataset.json"
    path.write_text(path.read_text().replace('"attribute": "score"', '"attribute": "truncate"'))
    with pytest.raises(DamagedShard, match="method of cuts"):
        list(open_shar(dataset))


def test_a_rebuilt_index_keeps_the_declared_fields(built, tmp_path):
    dataset = add_fields(copy(built.dataset, tmp_path / "dataset"))
    before = snapshot(dataset)
    (dataset / "shards.jsonl").unlink()
    list(rebuild_index(dataset))
    assert snapshot(dataset) == before
    assert require_fields(dataset) == 7


def test_an_index_is_not_made_of_other_lines(built, tmp_path):
    dataset = add_fields(copy(built.dataset, tmp_path / "dataset"))
    path = dataset / SCORE.path(0)
    write_cut_lines(path, read_json_lines(path)[:-1])
    with pytest.raises(DamagedShard, match=r"score.*items for 3 cuts"):
        list(rebuild_index(dataset))


def test_a_removed_codec_leaves_the_audio(built, tmp_path):
    dataset = ShardedDataset(copy(built.dataset, tmp_path / "dataset"))
    before = snapshot(dataset.directory)
    dataset.remove_fields(codec_fields("toy"), 3)
    after = snapshot(dataset.directory)
    assert after.keys() == {name for name in before if not name.startswith("codes_toy/")}
    assert {name for name in after if after[name] != before[name]} == {"dataset.json", "shards.jsonl"}
    assert dataset.record().codecs == dataset.stored_codecs() == []
    assert {field for shard in dataset.shards() for field in shard.fields} == set(dataset.record().fields)
    dataset.remove_fields(codec_fields("toy"), 3)
    assert snapshot(dataset.directory) == after


def test_what_others_have_put_there_is_not_removed(built, tmp_path):
    dataset = ShardedDataset(copy(built.dataset, tmp_path / "dataset"))
    (dataset.directory / "notes.txt").write_text("mine")
    dataset.remove(3)
    assert snapshot(dataset.directory) == {"notes.txt": b"mine"}
    assert not dataset.is_empty()
    (dataset.directory / "notes.txt").unlink()
    assert dataset.is_empty()
    assert ShardedDataset(dataset.directory / "absent").is_empty()
