"""``open_shar(on_damage="skip")``: what is damaged is left out, counted, and limited; nothing else is lost."""

from __future__ import annotations

import logging

import pytest
from support.errors import raises
from support.reader import make_dataset
from support.shar import copy, members_of, write_members

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.reading.state import merge_states


def ids(cuts):
    return [cut.id for cut in cuts]


@pytest.fixture
def damaged(tmp_path):
    """Twelve cuts in four shards: the whole of the second is damaged, and the last cut of the third."""
    dataset = make_dataset(tmp_path, [3, 3, 3, 3], codes=True)
    (dataset / "codes_toy/context_codes/codes.000001.tar").write_bytes(b"")
    path = dataset / "codes_toy/target_codes/codes.000002.tar"
    members = members_of(path)
    last = members[-2][0].rpartition(".")[0]
    write_members(path, [(name, data[:-1] if name == f"{last}.npy" else data) for name, data in members])
    return dataset


@pytest.fixture
def whole(damaged):
    """The ids of all cuts in order, and the places of those that can be read."""
    return ids(open_shar(damaged, [])), [0, 1, 2, 6, 7, 9, 10, 11]


def test_what_is_damaged_is_left_out_and_named(damaged, whole, caplog):
    everything, left = whole
    cuts = open_shar(damaged, on_damage="skip")
    with caplog.at_level(logging.WARNING):
        assert ids(cuts) == [everything[place] for place in left]
    assert len(caplog.messages) == 4
    assert "codes.000001.tar" in caplog.messages[0]
    assert "codes.000002.tar" in caplog.messages[3]
    assert cuts.data.state_dict()["num_damaged"] == 4


def test_audio_that_cannot_be_decoded_is_left_out_by_the_threads_that_decode(built, tmp_path):
    dataset = copy(built.dataset, tmp_path / "damaged")
    path = dataset / "target_audio/recording.000000.tar"
    names = [name for name, _ in members_of(path)]
    write_members(path, [(name, data[:-30] if name == names[2] else data) for name, data in members_of(path)])
    with raises(DamagedShard, "damaged_shard"):
        list(open_shar(dataset, decode_threads=2))
    cuts = open_shar(dataset, decode_threads=2, on_damage="skip")
    everything = ids(open_shar(dataset, []))
    assert ids(cuts) == [everything[0], *everything[2:]]
    assert cuts.data.state_dict()["num_damaged"] == 1


def test_more_than_the_budget_is_raised(damaged):
    read = []
    with raises(DamagedShard, "damaged_shard", "codes.000001.tar", "max_damaged=2"):
        read.extend(open_shar(damaged, on_damage="skip", max_damaged=2))
    assert len(read) == 3


@pytest.mark.parametrize("option", [{"on_damage": "ignore"}, {"max_damaged": -1}, {"tail": "pad", "on_damage": "skip"}])
def test_options_that_make_no_sense_are_refused(damaged, option):
    with raises(ConfigError, "bad_config_value", next(iter(option))):
        open_shar(damaged, **option)


def test_each_part_goes_on_with_its_share_of_the_budget_that_is_used(damaged):
    options = {"world_size": 2, "block_size": 3, "on_damage": "skip", "max_damaged": 3}
    states = []
    for rank in range(2):
        reader = open_shar(damaged, rank=rank, **options).data
        list(reader)
        states.append(reader.state_dict())
    assert sorted(state["num_damaged"] for state in states) == [1, 3]
    merged = merge_states(states)
    readers = [open_shar(damaged, rank=rank, **options).data for rank in range(2)]
    for reader in readers:
        reader.load_state_dict(merged)
    assert [reader.state_dict()["num_damaged"] for reader in readers] == [2, 2]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_count_goes_on_after_a_resume_on_another_number_of_ranks(damaged, whole, shuffle):
    everything, left = whole
    options = {"shuffle": shuffle, "seed": 3, "block_size": 1, "on_damage": "skip"}
    ranks = [open_shar(damaged, rank=rank, world_size=2, **options).data for rank in range(2)]
    begun = [[cut for _, cut in zip(range(3), rank, strict=False)] for rank in ranks]
    merged = merge_states([rank.state_dict() for rank in ranks])
    rest = []
    for rank in range(3):
        reader = open_shar(damaged, rank=rank, world_size=3, **options).data
        reader.load_state_dict(merged)
        rest.append((list(reader), reader.state_dict()))
    read = [cut for cuts in (*begun, *(cuts for cuts, _ in rest)) for cut in cuts]
    assert sorted(ids(read)) == sorted(everything[place] for place in left)
    assert merge_states([state for _, state in rest])["num_damaged"] == 4
