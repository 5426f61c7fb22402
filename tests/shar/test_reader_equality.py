"""``open_shar`` against ``lhotse.CutSet.from_shar`` on sharmill's own shards: cuts, codes, and audio decoded ahead."""

from __future__ import annotations

import os
import pickle
from itertools import islice
from unittest import mock

import numpy as np
import pytest
from lhotse import AudioSource, CutSet
from support.errors import raises
from support.pipelines import shar_fields
from support.reader import make_dataset
from support.shar import voice

from sharmill.errors import DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.index import read_shards


@pytest.fixture
def pairs(built):
    """Our cuts and lhotse's, without what tells where they come from; ``recording`` is ours alone."""
    ours, theirs = list(open_shar(built.dataset)), list(CutSet.from_shar(fields=shar_fields(built.dataset, "toy")))
    for cut in (*ours, *theirs):
        for key in ("shar_position", "shard_origin", "shar_epoch"):
            cut.drop_custom(key)
    return list(zip(ours, theirs, strict=True))


def test_cuts_are_lhotses(pairs):
    assert len(pairs) == 7
    for ours, theirs in pairs:
        assert ours.recording.id == theirs.recording.id
        ours.recording = theirs.recording
        assert ours == theirs
        assert theirs == ours
        assert ours.to_dict().keys() == theirs.to_dict().keys()


def test_codes_and_audio_are_lhotses(pairs):
    for ours, theirs in pairs:
        for name in ("target_codes", "context_codes"):
            codes = getattr(ours, name).load()
            np.testing.assert_array_equal(codes, getattr(theirs, name).load())
            assert codes.flags.writeable
        for name in ("target_audio", "context_audio"):
            np.testing.assert_array_equal(getattr(ours, name).load_audio(), getattr(theirs, name).load_audio())


def test_arrays_differ_where_their_content_does(pairs):
    (one, other), (another, _) = pairs[:2]
    assert one.context_codes == other.context_codes
    assert one.context_codes != another.context_codes
    assert one.target_codes != another.target_codes
    assert one.target_codes != 3


@pytest.fixture(scope="module", params=["flac", "wav", "mp3", "opus"])
def formats(request, tmp_path_factory):
    from support.shar import Project

    project = Project(tmp_path_factory.mktemp(request.param))
    for number, seconds in enumerate([1.0, 2.005, 0.5]):
        project.add(f"{number}.wav", voice(seconds, seed=number))
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


def test_nothing_is_decoded_twice_and_each_use_has_samples_of_its_own(built):
    cuts = list(open_shar(built.dataset, decode_threads=2))
    with mock.patch.object(AudioSource, "load_audio", side_effect=AssertionError("decoded again")):
        for cut in cuts:
            first = cut.load_audio()
            first[:] = 7
            assert not np.any(cut.load_audio() == 7)
            assert cut.load_context_audio().shape == (1, cut.context_audio.num_samples)
            assert cut.truncate(offset=0.05, duration=0.1).load_audio().shape == (1, 1600)


def test_decoding_ahead_keeps_order_and_position(built):
    plain = [(cut.id, cut.shar_position) for cut in open_shar(built.dataset, shuffle=True)]
    ahead = [(cut.id, cut.shar_position) for cut in open_shar(built.dataset, shuffle=True, decode_threads=3)]
    assert ahead == plain


def test_the_state_does_not_count_what_is_only_decoded_ahead(built):
    reader = open_shar(built.dataset, decode_threads=2, decode_prefetch=7)
    begun = [cut.id for cut in islice(iter(reader), 2)]
    resumed = open_shar(built.dataset)
    resumed.data.load_state_dict(reader.data.state_dict())
    assert begun + [cut.id for cut in resumed] == [cut.id for cut in open_shar(built.dataset)]


def test_no_folder_is_listed_however_many_shards_there_are(tmp_path):
    dataset = make_dataset(tmp_path, [1] * 200)
    refused = AssertionError("a folder was listed")
    with mock.patch.object(os, "scandir", side_effect=refused), mock.patch.object(os, "listdir", side_effect=refused):
        assert len(list(open_shar(dataset, shuffle=True))) == 200


def test_only_the_shards_of_a_part_are_opened(tmp_path):
    dataset = make_dataset(tmp_path, [2] * 10)
    for shard in list(read_shards(dataset))[1::2]:
        (dataset / shard.fields["cuts"].file).unlink()
    even, odd = (open_shar(dataset, rank=rank, world_size=2, block_size=2) for rank in range(2))
    assert len(list(even)) == 10
    with raises(DamagedShard, "damaged_shard", "cuts"):
        list(odd)
