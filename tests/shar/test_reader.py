"""``open_shar``: chosen fields and codecs, the cuts, codes and audio that lhotse reads, and damaged datasets."""

import logging
import pickle
from itertools import islice

import numpy as np
import pytest
from lhotse import CutSet
from support.project import (
    Project,
    ToyCodec,
    copy,
    make_bare_dataset,
    members_of,
    raises,
    shar_fields,
    write_members,
)

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.items import read_field
from sharmill.shar.reading.state import merge_states

FIELDS = {
    "target_audio": "target_audio",
    "context_audio": "context_audio",
    "target_codes": "codes_toy/target_codes",
    "context_codes": "codes_toy/context_codes",
}


@pytest.fixture
def damaged(built, tmp_path):
    return copy(built.dataset, tmp_path / "damaged")


@pytest.mark.parametrize("field", ["context_audio", "context_codes"])
def test_a_missing_context_field_is_a_clear_error(without_contexts, field):
    with raises(ConfigError, "unknown_field", f"no field '{field}': it has no contexts", "target_audio"):
        open_shar(without_contexts.dataset, ["target_audio", field])


def test_it_is_a_lazy_cutset_on_which_lhotse_works(built):
    cuts = open_shar(built.dataset)
    assert isinstance(cuts, CutSet)
    assert (cuts.is_lazy, len(cuts)) == (True, 7)
    for _ in range(2):
        assert [cut.supervisions[0].custom["number"] for cut in cuts] == list(range(7))
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
    project.add_voices([1.0] * 2, "{}.wav")
    project.write()
    (cut, _) = open_shar(project.dataset)
    assert cut.has_custom("target_audio")
    assert not cut.has_custom("target_codes")
    with raises(ConfigError, "unknown_field", "'target_codes'", "target_audio, context_audio"):
        open_shar(project.dataset, ["target_codes"])
    with raises(ConfigError, "unknown_codec", "'toy'"):
        open_shar(project.dataset, codec="toy")


def test_of_two_codecs_one_must_be_named(project):
    project.add_voices([1.0] * 2, "{}.wav")
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


def test_what_is_no_dataset_is_named(tmp_path, built):
    with raises(ConfigError, "no_dataset", str(tmp_path), "dataset.json"):
        open_shar(tmp_path)
    with raises(ConfigError, "no_dataset", str(built.dataset / "dataset.json")):
        open_shar(built.dataset / "dataset.json")


TARGETS = "target_audio/recording.000001.tar"


def test_the_shards_before_the_damage_are_read(damaged):
    (damaged / TARGETS).write_bytes(b"")
    read = []
    with raises(DamagedShard, "damaged_shard"):
        read.extend(cut.supervisions[0].custom["number"] for cut in open_shar(damaged))
    assert read == [0, 1, 2]


def test_placeholders_leave_the_cut_without_the_field(damaged):
    path = damaged / TARGETS
    items = list(read_field(path))
    content = [(f"{items[0].cut_id}.nodata", b""), (f"{items[0].cut_id}.nometa", b""), *members_of(path)[2:]]
    write_members(path, content)
    cuts = list(open_shar(damaged))
    assert [cut.has_custom("target_audio") for cut in cuts] == [True] * 3 + [False] + [True] * 3


def test_an_unfinished_dataset_is_not_read_as_another_tools(built, tmp_path):
    folder = copy(built.dataset, tmp_path / "unfinished")
    for name in ("dataset.json", "shards.jsonl"):
        (folder / name).unlink()
    (folder / "cuts/cuts.000000.jsonl.gz").unlink()
    for field in folder.rglob("*.000000.tar"):
        field.unlink()
    with raises(ConfigError, "no_dataset", "sharmill index"):
        open_shar(folder)


def test_an_exchanged_shard_is_damage(built, tmp_path):
    folder = copy(built.dataset, tmp_path / "dataset")
    cuts = iter(open_shar(folder))
    next(cuts)
    for path in folder.rglob("*.000002.*"):
        path.replace(path.with_name(path.name.replace("000002", "000001")))
    with raises(DamagedShard, "damaged_shard", "shard 1"):
        list(cuts)


@pytest.fixture
def pairs(built):
    """Our cuts and lhotse's, without attributes that describe their origin; only ours have ``recording``."""
    ours, theirs = list(open_shar(built.dataset)), list(CutSet.from_shar(fields=shar_fields(built.dataset, "toy")))
    for cut in (*ours, *theirs):
        for key in ("shar_position", "shard_origin", "shar_epoch"):
            cut.drop_custom(key)
    return list(zip(ours, theirs, strict=True))


def test_cuts_codes_and_audio_are_lhotses(pairs):
    assert len(pairs) == 7
    for ours, theirs in pairs:
        assert ours.recording.id == theirs.recording.id
        ours.recording = theirs.recording
        assert ours == theirs
        assert theirs == ours
        assert ours.to_dict().keys() == theirs.to_dict().keys()
        for name in ("target_codes", "context_codes"):
            codes = getattr(ours, name).load()
            np.testing.assert_array_equal(codes, getattr(theirs, name).load())
            assert codes.flags.writeable
        for name in ("target_audio", "context_audio"):
            np.testing.assert_array_equal(getattr(ours, name).load_audio(), getattr(theirs, name).load_audio())


@pytest.fixture(scope="module", params=["flac", "wav", "mp3", "opus"])
def formats(request, tmp_path_factory):
    project = Project(tmp_path_factory.mktemp(request.param)).add_voices([1.0, 2.005, 0.5], "{}.wav")
    project.write(write={"audio_format": request.param}, match={"min_duration": 0.0})
    return project.dataset


def test_audio_that_is_decoded_ahead_is_lhotses(formats):
    for ours, plain in zip(open_shar(formats, decode_threads=2), open_shar(formats), strict=True):
        for change in (
            lambda cut: cut,
            lambda cut: cut.truncate(offset=0.1, duration=0.3),
            lambda cut: cut.resample(8000),
            lambda cut: cut.perturb_volume(0.5),
            lambda cut: pickle.loads(pickle.dumps(cut)),
        ):
            np.testing.assert_array_equal(change(ours).load_audio(), change(plain).load_audio())
            np.testing.assert_array_equal(change(ours).load_context_audio(), change(plain).load_context_audio())


def test_decoding_ahead_keeps_the_order_and_the_state(built):
    reader = open_shar(built.dataset, shuffle=True, decode_threads=2, decode_prefetch=7)
    begun = [(cut.id, cut.shar_position) for cut in islice(iter(reader), 2)]
    resumed = open_shar(built.dataset, shuffle=True)
    resumed.data.load_state_dict(reader.data.state_dict())
    plain = [(cut.id, cut.shar_position) for cut in open_shar(built.dataset, shuffle=True)]
    assert begun + [(cut.id, cut.shar_position) for cut in resumed] == plain


def ids(cuts):
    return [cut.id for cut in cuts]


@pytest.fixture
def holed(tmp_path):
    """Twelve cuts in four shards: the second shard is damaged completely, and the last cut of the third."""
    dataset = make_bare_dataset(tmp_path, [3, 3, 3, 3], codes=True)
    (dataset / "codes_toy/context_codes/codes.000001.tar").write_bytes(b"")
    path = dataset / "codes_toy/target_codes/codes.000002.tar"
    members = members_of(path)
    last = members[-2][0].rpartition(".")[0]
    write_members(path, [(name, data[:-1] if name == f"{last}.npy" else data) for name, data in members])
    return dataset


@pytest.fixture
def whole(holed):
    """The ids of all cuts in order, and the indices of the readable ones."""
    return ids(open_shar(holed, [])), [0, 1, 2, 6, 7, 9, 10, 11]


def test_what_is_damaged_is_left_out_and_named(holed, whole, caplog):
    everything, left = whole
    cuts = open_shar(holed, on_damage="skip")
    with caplog.at_level(logging.WARNING):
        assert ids(cuts) == [everything[place] for place in left]
    assert len(caplog.messages) == 4
    assert "codes.000001.tar" in caplog.messages[0]
    assert "codes.000002.tar" in caplog.messages[3]
    assert cuts.data.state_dict()["num_damaged"] == 4


def test_more_than_the_budget_is_raised(holed):
    read = []
    with raises(DamagedShard, "damaged_shard", "codes.000001.tar", "max_damaged=2"):
        read.extend(open_shar(holed, on_damage="skip", max_damaged=2))
    assert len(read) == 3


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_damage_count_survives_a_resume_on_other_ranks(holed, whole, shuffle):
    everything, left = whole
    options = {"shuffle": shuffle, "seed": 3, "block_size": 1, "on_damage": "skip"}
    ranks = [open_shar(holed, rank=rank, world_size=2, **options).data for rank in range(2)]
    begun = [[cut for _, cut in zip(range(3), rank, strict=False)] for rank in ranks]
    merged = merge_states([rank.state_dict() for rank in ranks])
    rest = []
    for rank in range(3):
        reader = open_shar(holed, rank=rank, world_size=3, **options).data
        reader.load_state_dict(merged)
        rest.append((list(reader), reader.state_dict()))
    read = [cut for cuts in (*begun, *(cuts for cuts, _ in rest)) for cut in cuts]
    assert sorted(ids(read)) == sorted(everything[place] for place in left)
    assert merge_states([state for _, state in rest])["num_damaged"] == 4
