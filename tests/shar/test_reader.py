"""``open_shar``: chosen fields and codecs, nothing else opened, and damage that is an error."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from lhotse import CutSet
from support.errors import raises
from support.pipelines import shar_fields
from support.reader import make_dataset
from support.shar import ToyCodec, copy, lines, members_of, reindex, rewrite, voice, write_members

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.items import read_field

FIELDS = {
    "target_audio": "target_audio",
    "context_audio": "context_audio",
    "target_codes": "codes_toy/target_codes",
    "context_codes": "codes_toy/context_codes",
}


@pytest.fixture
def damaged(built, tmp_path):
    return copy(built.dataset, tmp_path / "damaged")


def test_the_cuts_come_in_order_as_often_as_asked(built):
    cuts = open_shar(built.dataset)
    numbers = [cut.supervisions[0].custom["number"] for cut in cuts]
    assert numbers == list(range(7))
    assert [cut.supervisions[0].custom["number"] for cut in cuts] == numbers


def test_a_dataset_without_contexts_has_targets_only(without_contexts):
    cuts = list(open_shar(without_contexts.dataset, shuffle=True, seed=1))
    assert sorted(cut.supervisions[0].custom["number"] for cut in cuts) == list(range(7))
    plain = {cut.id: cut for cut in CutSet.from_shar(fields=shar_fields(without_contexts.dataset, "toy"))}
    for cut in cuts:
        assert not [name for name in FIELDS if "context" in name and cut.has_custom(name)]
        np.testing.assert_array_equal(cut.load_audio(), plain[cut.id].load_target_audio())
        np.testing.assert_array_equal(cut.load_target_codes(), plain[cut.id].load_target_codes())
        assert cut.truncate(duration=0.1).load_target_codes().shape == (3, 5)


def test_a_context_that_a_dataset_does_not_have_is_an_error_that_says_so(without_contexts):
    for field in ("context_audio", "context_codes"):
        with raises(ConfigError, "unknown_field", f"no field '{field}': it has no contexts", "target_audio"):
            open_shar(without_contexts.dataset, ["target_audio", field])


def test_it_is_a_lazy_cutset_with_a_length(built):
    cuts = open_shar(built.dataset)
    assert isinstance(cuts, CutSet)
    assert cuts.is_lazy
    assert len(cuts) == 7


def test_lhotse_works_on_it(built):
    cuts = open_shar(built.dataset)
    assert len(list(cuts.filter(lambda cut: cut.duration >= 1.0))) == 4
    assert len(list(cuts + open_shar(built.dataset, []))) == 14
    assert len(list(CutSet.mux(cuts, cuts, seed=0))) == 14
    assert sorted(cut.id for cut in cuts.shuffle()) == sorted(cut.id for cut in cuts)
    assert [cut.id for cut in cuts.to_eager()] == [cut.id for cut in cuts]


def test_it_can_be_sent_to_another_process(built):
    cuts = pickle.loads(pickle.dumps(open_shar(built.dataset)))
    cut = pickle.loads(pickle.dumps(next(iter(cuts))))
    assert cut.load_target_codes().shape == (3, 50)


@pytest.mark.parametrize("field", FIELDS)
def test_only_the_chosen_field_is_opened(damaged, field):
    for name, folder in FIELDS.items():
        if name != field:
            for path in (damaged / folder).iterdir():
                path.unlink()
    cuts = list(open_shar(damaged, [field]))
    assert len(cuts) == 7
    for cut in cuts:
        assert cut.has_custom(field)
        assert not any(cut.has_custom(name) for name in FIELDS if name != field)
        assert cut.load_custom(field).shape[0] in (1, 3)


def test_no_field_at_all_is_the_cuts_alone(damaged):
    for folder in FIELDS.values():
        for path in (damaged / folder).iterdir():
            path.unlink()
    for fields in ([], ["cuts"]):
        assert len(list(open_shar(damaged, fields))) == 7


def test_the_target_is_the_recording_where_it_is_read(built):
    for cut in open_shar(built.dataset, ["target_audio"]):
        audio = cut.load_audio()
        np.testing.assert_array_equal(audio, cut.load_target_audio())
        assert audio.shape == (1, cut.num_samples)
        assert cut.recording_id == cut.supervisions[0].recording_id
        resampled = cut.resample(8000)
        assert resampled.load_audio().shape == (1, resampled.num_samples)
    for cut in open_shar(built.dataset, ["context_audio"]):
        assert cut.recording.sources[0].source == cut.supervisions[0].custom["audio_filepath"]


def test_without_codec_there_is_only_audio(tmp_path, project):
    for number in range(2):
        project.add(f"{number}.wav", voice(1.0, seed=number))
    project.write()
    (cut, _) = open_shar(project.dataset)
    assert cut.has_custom("target_audio")
    assert not cut.has_custom("target_codes")
    with raises(ConfigError, "unknown_field", "'target_codes'", "target_audio, context_audio"):
        open_shar(project.dataset, ["target_codes"])
    with raises(ConfigError, "unknown_codec", "'toy'"):
        open_shar(project.dataset, codec="toy")


def test_of_two_codecs_one_must_be_named(project):
    for number in range(2):
        project.add(f"{number}.wav", voice(1.0, seed=number))
    config = project.write()
    project.encode(config, "fine", ToyCodec(samples_per_frame=160))
    project.encode(config, "coarse", ToyCodec(samples_per_frame=640))
    with raises(ConfigError, "unknown_codec", "coarse, fine", "codec="):
        open_shar(project.dataset)
    with raises(ConfigError, "unknown_codec", "codec="):
        open_shar(project.dataset, ["context_codes"])
    for codec, frames in (("fine", 100), ("coarse", 25)):
        assert {cut.target_codes.shape[1] for cut in open_shar(project.dataset, codec=codec)} == {frames}
    assert len(list(open_shar(project.dataset, ["target_audio"]))) == 2


@pytest.mark.parametrize(
    ("options", "code", "names"),
    [
        ({"fields": ["target_video"]}, "unknown_field", ["'target_video'", "target_audio"]),
        ({"codec": "mimi"}, "unknown_codec", ["'mimi'", "toy"]),
    ],
)
def test_what_is_not_there_is_named(built, options, code, names):
    with raises(ConfigError, code, *names):
        open_shar(built.dataset, **options)


def test_what_is_no_dataset_is_named(tmp_path, built):
    with raises(ConfigError, "no_dataset", str(tmp_path), "dataset.json"):
        open_shar(tmp_path)
    with raises(ConfigError, "no_dataset", str(built.dataset / "dataset.json")):
        open_shar(built.dataset / "dataset.json")


def test_a_dataset_of_another_version_is_named_whatever_its_keys(damaged):
    (damaged / "dataset.json").write_text('{"format_version": 2, "tables": []}')
    with raises(ConfigError, "wrong_version", "2"):
        open_shar(damaged)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format_version": "1"}', b"\xff"])
def test_a_damaged_description_is_an_error(damaged, content):
    (damaged / "dataset.json").write_bytes(content)
    with raises(DamagedShard, "damaged_shard", "dataset.json"):
        open_shar(damaged)


@pytest.mark.parametrize("file", ["../outside.tar", "/etc/passwd", "cuts/../../outside"])
def test_an_index_that_leaves_the_dataset_is_refused(damaged, file):
    shards = lines(damaged / "shards.jsonl")
    shards[1]["fields"]["target_audio"]["file"] = file
    rewrite(damaged / "shards.jsonl", shards)
    with raises(DamagedShard, "damaged_shard", file):
        list(open_shar(damaged))


TARGETS = "target_audio/recording.000001.tar"


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-512]),
        lambda path: path.write_bytes(path.read_bytes()[:-1024]),
        lambda path: path.write_bytes(path.read_bytes()[:1000]),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: write_members(path, members_of(path)[2:] + members_of(path)[:2]),
        lambda path: write_members(path, members_of(path)[:-2]),
        lambda path: write_members(path, [*members_of(path), ("more.flac", b"x"), ("more.json", b"{}")]),
        lambda path: write_members(path, []),
    ],
)
@pytest.mark.parametrize("checksums", ["stale", "fresh"])
def test_a_damaged_field_raises_and_never_ends_early(damaged, damage, checksums):
    damage(damaged / TARGETS)
    if checksums == "fresh":
        reindex(damaged)
    with raises(DamagedShard, "damaged_shard", "000001"):
        list(open_shar(damaged))


def test_an_array_that_is_damaged_names_archive_and_member(tmp_path):
    dataset = make_dataset(tmp_path, [3], codes=True)
    path = dataset / "codes_toy/target_codes/codes.000000.tar"
    write_members(path, [(name, data[:-1] if name.endswith(".npy") else data) for name, data in members_of(path)])
    with raises(DamagedShard, "damaged_shard", str(path), "'cut-rec-0-0.00-0.40.npy'"):
        next(iter(open_shar(dataset)))
    assert len(list(open_shar(dataset, ["context_codes"]))) == 3


def test_the_shards_before_the_damage_are_read(damaged):
    (damaged / TARGETS).write_bytes(b"")
    read = []
    with raises(DamagedShard, "damaged_shard"):
        read.extend(cut.supervisions[0].custom["number"] for cut in open_shar(damaged))
    assert read == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda cuts: cuts[:-1],
        lambda cuts: [],
        lambda cuts: [*cuts, cuts[0]],
        lambda cuts: [{**cut, "type": "MultiCut"} for cut in cuts],
        lambda cuts: [{key: value for key, value in cut.items() if key != "start"} for cut in cuts],
        lambda cuts: [{**cut, "supervisions": 3} for cut in cuts],
    ],
)
def test_damaged_cuts_raise(damaged, change):
    path = damaged / "cuts/cuts.000001.jsonl.gz"
    rewrite(path, change(lines(path)))
    for fields in (None, []):
        with raises(DamagedShard, "damaged_shard", "shard 1"):
            list(open_shar(damaged, fields))


def test_an_index_without_its_last_shard_raises(damaged):
    rewrite(damaged / "shards.jsonl", lines(damaged / "shards.jsonl")[:-1])
    read = []
    with raises(DamagedShard, "damaged_shard", "2", "3"):
        read.extend(open_shar(damaged))
    assert read == []


def test_an_index_that_lacks_a_field_raises(damaged):
    shards = lines(damaged / "shards.jsonl")
    del shards[2]["fields"]["context_audio"]
    rewrite(damaged / "shards.jsonl", shards)
    assert len(list(open_shar(damaged, ["target_audio"]))) == 7
    with raises(DamagedShard, "damaged_shard", "shard 2", "context_audio"):
        list(open_shar(damaged))


def test_placeholders_leave_the_cut_without_the_field(damaged):
    path = damaged / TARGETS
    items = list(read_field(path))
    content = [(f"{items[0].cut_id}.nodata", b""), (f"{items[0].cut_id}.nometa", b""), *members_of(path)[2:]]
    write_members(path, content)
    cuts = list(open_shar(damaged))
    assert [cut.has_custom("target_audio") for cut in cuts] == [True] * 3 + [False] + [True] * 3


def test_an_unfinished_dataset_is_not_taken_for_shards_of_another_tool(built, tmp_path):
    folder = copy(built.dataset, tmp_path / "unfinished")
    for name in ("dataset.json", "shards.jsonl"):
        (folder / name).unlink()
    (folder / "cuts/cuts.000000.jsonl.gz").unlink()
    for field in folder.rglob("*.000000.tar"):
        field.unlink()
    with raises(ConfigError, "no_dataset", "sharmill index"):
        open_shar(folder)


def test_codes_may_be_added_while_cuts_are_read(built, tmp_path):
    folder = copy(built.dataset, tmp_path / "dataset")
    index, records = folder / "shards.jsonl", lines(folder / "shards.jsonl")
    expected = [cut.id for cut in open_shar(folder)]
    cuts = iter(open_shar(folder))
    read = [next(cuts).id]
    for record in records:
        record["fields"]["codes_later/target_codes"] = record["fields"]["target_audio"]
    index.with_name("new").write_text("".join(json.dumps(record) + "\n" for record in records))
    index.with_name("new").replace(index)
    read += [cut.id for cut in cuts]
    assert read == expected
    assert len(records) > 1


def test_other_shards_in_the_place_of_those_that_are_read_are_damage(built, tmp_path):
    folder = copy(built.dataset, tmp_path / "dataset")
    index, records = folder / "shards.jsonl", lines(folder / "shards.jsonl")
    cuts = iter(open_shar(folder))
    next(cuts)
    records[0]["count"], records[1]["count"] = records[0]["count"] - 1, records[1]["count"] + 1
    index.with_name("new").write_text("".join(json.dumps(record) + "\n" for record in records))
    index.with_name("new").replace(index)
    with raises(DamagedShard, "damaged_shard", str(folder)):
        list(cuts)
