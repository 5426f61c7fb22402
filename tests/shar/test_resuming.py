"""Exactly once: whatever the interruptions, and however many ranks go on."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.errors import raises
from support.properties import examples
from support.reader import make_dataset, numbers

from sharmill.errors import ConfigError
from sharmill.shar import merge_states, open_shar
from sharmill.shar.sidecars import write_sidecars

COUNTS = [7, 30, 1, 0, 12, 30, 5, 23]
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    dataset = make_dataset(tmp_path_factory.mktemp("resuming") / "dataset", COUNTS)
    write_sidecars(dataset)
    return dataset


def parts(dataset, count, state=None, **options):
    """A reader for each of ``count`` parts."""
    readers = [open_shar(dataset, [], rank=rank, world_size=count, **options) for rank in range(count)]
    for reader in readers:
        if state is not None:
            reader.data.load_state_dict(json.loads(json.dumps(state)))
    return readers


def state_of(readers):
    return merge_states([reader.data.state_dict() for reader in readers])


OPTIONS = st.fixed_dictionaries(
    {
        "shuffle": st.sampled_from([False, True, "global"]),
        "seed": st.integers(0, 100),
        "mix_shards": st.integers(1, 9),
        "block_size": st.sampled_from([None, 1, 4, 100]),
    }
)


@given(OPTIONS, st.integers(1, 9))
@settings(deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])
def test_parts_divide_the_one_order(dataset, options, count):
    whole = list(open_shar(dataset, [], **options))
    assert sorted(numbers(whole)) == list(range(TOTAL))
    positions = [cut.shar_position for cut in whole]
    assert positions == sorted(positions)
    for rank, reader in enumerate(parts(dataset, count, **options)):
        expected = [cut.id for cut in whole if cut.shar_position[3] % count == rank]
        assert [cut.id for cut in reader] == expected


@given(OPTIONS, st.integers(1, 5), st.integers(0, 3 * TOTAL))
@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
def test_with_as_many_parts_the_order_is_as_without_interruption(dataset, options, count, taken):
    options |= {"infinite": True, "block_size": 1}
    expected = [list(islice(numbers_of(reader), 4 * TOTAL)) for reader in parts(dataset, count, **options)]
    readers = parts(dataset, count, **options)
    begun = []
    for rank, reader in enumerate(readers):
        begun.append(list(islice(numbers_of(reader), taken + rank)))
    resumed = parts(dataset, count, state_of(readers), **options)
    for first, reader, whole in zip(begun, resumed, expected, strict=True):
        assert first + list(islice(numbers_of(reader), 4 * TOTAL - len(first))) == whole


def numbers_of(cuts):
    return (number for cut in cuts for number in numbers([cut]))


@pytest.mark.parametrize("seed", range(50))
def test_every_cut_comes_once_per_epoch_whatever_the_interruptions(dataset, seed):
    rng = random.Random(seed)
    options = {
        "shuffle": True,
        "seed": seed,
        "mix_shards": rng.choice([1, 3, 8]),
        "infinite": True,
        "block_size": 1,
    }
    seen, state = Counter(), None
    while state is None or state["epoch"] < 2:
        readers = parts(dataset, rng.randint(1, 8) * max(1, rng.randint(0, 3)), state, **options)
        streams = [iter(reader) for reader in readers]
        for _ in range(rng.randint(0, TOTAL)):
            cut = next(rng.choice(streams))
            seen[cut.shar_position[0], cut.id] += 1
        state = state_of(readers)
    assert set(seen.values()) == {1}
    assert Counter(epoch for epoch, _ in seen)[0] == TOTAL
    assert Counter(epoch for epoch, _ in seen)[1] == TOTAL
    assert len(json.dumps(state)) < 20_000


@pytest.mark.parametrize("seed", range(30))
def test_what_was_read_ahead_and_not_used_comes_again(dataset, seed):
    rng = random.Random(seed)
    options = {"shuffle": True, "seed": seed, "infinite": True, "block_size": 1}
    used, state = Counter(), None
    while state is None or state["epoch"] < 2:
        count = rng.randint(1, 8)
        readers = [cuts.data for cuts in parts(dataset, count, state, **options)]
        streams, buffers = [], [[] for _ in range(count)]
        for reader in readers:
            reader.count_only_marked()
            streams.append(iter(reader))
        for _ in range(rng.randint(0, TOTAL)):
            # A buffer that gives out in any order, as shuffling and buckets do.
            rank = rng.randrange(count)
            while len(buffers[rank]) < 5:
                buffers[rank].append(next(streams[rank]))
            cut = buffers[rank].pop(rng.randrange(5))
            used[cut.shar_position[0], cut.id] += 1
            readers[rank].mark_consumed([cut])
        state = merge_states([reader.state_dict() for reader in readers])
    assert set(used.values()) == {1}
    assert Counter(epoch for epoch, _ in used)[0] == TOTAL
    assert Counter(epoch for epoch, _ in used)[1] == TOTAL


def test_single_epochs_follow_each_other(dataset):
    options = {"shuffle": True, "seed": 3}
    reader = open_shar(dataset, [], **options)
    epochs = [numbers(reader) for _ in range(3)]
    assert all(sorted(epoch) == list(range(TOTAL)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = open_shar(dataset, [], **options)
    again.data.set_epoch(2)
    assert numbers(again) == epochs[2]
    endless = open_shar(dataset, [], infinite=True, **options)
    assert list(islice(numbers_of(endless), 3 * TOTAL)) == [number for epoch in epochs for number in epoch]


def test_the_state_at_the_end_of_an_epoch_leads_to_the_next(dataset):
    reader = open_shar(dataset, [], shuffle=True)
    first, state = numbers(reader), reader.data.state_dict()
    second = numbers(reader)
    resumed = open_shar(dataset, [], shuffle=True)
    resumed.data.load_state_dict(state)
    assert numbers(resumed) == []
    assert numbers(resumed) == second != first


def test_iterating_again_begins_where_the_loaded_state_is(dataset):
    reader = open_shar(dataset, [], shuffle=True)
    stream = iter(reader)
    begun = numbers(islice(stream, 20))
    resumed = open_shar(dataset, [], shuffle=True)
    resumed.data.load_state_dict(reader.data.state_dict())
    peek = next(iter(resumed))
    rest = numbers(resumed)
    assert rest[0] == numbers([peek])[0]
    assert sorted(begun + rest) == list(range(TOTAL))


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_tails(dataset, tail, count):
    readers = parts(dataset, count, tail=tail, block_size=4)
    read = [list(reader) for reader in readers]
    lengths = [len(cuts) for cuts in read]
    unequal = [len(list(reader)) for reader in parts(dataset, count, block_size=4)]
    own = [cut.id for cuts in read for cut in cuts if not cut.has_custom("shar_padding")]
    assert len(set(own)) == len(own)
    if tail == "keep":
        assert lengths == unequal
    if tail == "drop":
        assert lengths == [min(unequal)] * count
        assert len(own) == sum(lengths)
    if tail == "pad":
        assert lengths == [max(unequal)] * count
        assert len(own) == TOTAL
        padding = [numbers([cut])[0] for cut in read[-1] if cut.has_custom("shar_padding")]
        assert padding == list(range(len(padding)))


def test_more_parts_than_cuts(tmp_path):
    dataset = make_dataset(tmp_path, [2, 1])
    assert [numbers(reader) for reader in parts(dataset, 5)] == [[0], [1], [], [2], []]
    assert [numbers(reader) for reader in parts(dataset, 5, tail="pad")] == [[0], [1], [0], [2], [0]]
    assert [numbers(reader) for reader in parts(dataset, 5, tail="drop")] == [[]] * 5
    with raises(ConfigError, "too_few_cuts", "4", "5"):
        next(iter(parts(dataset, 5, infinite=True)[4]))


def test_an_endless_part_that_draws_no_cut_in_an_epoch_goes_on(tmp_path):
    dataset = make_dataset(tmp_path, [2, 1, 1])
    seen = Counter()
    for reader in parts(dataset, 4, shuffle=True, infinite=True):
        stream = (cut.shar_position[0] for cut in reader)
        seen.update(epoch for epoch in islice(stream, 60) if epoch < 20)
    assert seen == dict.fromkeys(range(20), 4)
    with raises(ConfigError, "too_few_cuts", "2", "3"):
        next(iter(parts(make_dataset(tmp_path / "one", [2]), 3, shuffle=True, infinite=True, block_size=2)[2]))


def test_states_that_do_not_belong_together_are_refused(dataset, tmp_path):
    states = [reader.data.state_dict() for reader in parts(dataset, 3)]
    merged = merge_states(states)
    with raises(ConfigError, "wrong_state", "[1]"):
        merge_states([states[0], states[2]])
    with raises(ConfigError, "wrong_state", "twice"):
        merge_states([*states, states[1]])
    with raises(ConfigError, "wrong_state"):
        merge_states([merged])
    with raises(ConfigError, "wrong_state"):
        merge_states([])
    with raises(ConfigError, "wrong_state", "2", "3"):
        merge_states([*states, *[reader.data.state_dict() for reader in parts(dataset, 2)]])
    with raises(ConfigError, "wrong_state", "shuffle"):
        open_shar(dataset, [], shuffle=True).data.load_state_dict(merged)
    shuffled = open_shar(dataset, [], shuffle=True).data.state_dict()
    with raises(ConfigError, "wrong_state", "seed", "0", "1"):
        open_shar(dataset, [], shuffle=True, seed=1).data.load_state_dict(shuffled)
    with raises(ConfigError, "wrong_state"):
        open_shar(make_dataset(tmp_path, [3, 3]), []).data.load_state_dict(merged)
    reader = open_shar(dataset, [])
    reader.data.load_state_dict(states[1])
    with raises(ConfigError, "wrong_state", "merge_states"):
        list(reader)
    with raises(ConfigError, "wrong_state"):
        open_shar(dataset, []).data.load_state_dict({"version": 1})
    with raises(ConfigError, "wrong_state", "7"):
        open_shar(dataset, []).data.load_state_dict({"version": 7})


@pytest.mark.parametrize("change", [
    {"epoch": "1"}, {"epoch": {}}, {"epoch": 1 << 62}, {"epoch": -1}, {"part": [0, 0]}, {"part": [0, 1 << 62]},
    {"identity": 3}, {"epochs": {"x": {"reached": [], "unused": []}}},
    {"epochs": {"-9": {"reached": [], "unused": []}}},
    {"epochs": {"0": {"reached": [[0, 1, "a", 0, 0, 0]], "unused": []}}},
    {"epochs": {"0": {"reached": [[0, 1 << 62, 0, 0, 0, 0]], "unused": []}}},
    {"epochs": {"0": {"reached": [[0, 1]], "unused": []}}}, {"epochs": {"0": {"reached": [], "unused": [[]]}}},
    {"epochs": {"0": {"reached": [], "unused": [["a", 1]]}}},
], ids=str)  # fmt: skip
def test_a_state_of_other_values_is_refused_in_one_line(dataset, change):
    reader = open_shar(dataset, [], shuffle=True)
    with raises(ConfigError, "wrong_state", "not the state of a Shar reader"):
        reader.data.load_state_dict(reader.data.state_dict() | change)


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 2, "world_size": 2},
        {"rank": -1},
        {"mix_shards": 0},
        {"shuffle": "all"},
        {"block_size": 0},
        {"tail": "cut"},
        {"tail": "drop", "infinite": True},
        {"decode_threads": -1},
    ],
)
def test_options_that_make_no_sense_are_refused(dataset, options):
    with raises(ConfigError, "bad_config_value", next(iter(options))):
        open_shar(dataset, [], **options)


def test_an_endless_reader_has_no_length(dataset):
    assert len(open_shar(dataset, [])) == TOTAL
    with pytest.raises(TypeError, match="no length"):
        len(open_shar(dataset, [], infinite=True))


def test_a_filter_that_nobody_told_of_is_forgotten_after_max_lag(dataset):
    reader = open_shar(dataset, [], infinite=True, block_size=1).data
    reader.count_only_marked(max_lag=10)
    for cut in islice(reader, 5 * TOTAL):
        if cut.supervisions[0].custom["number"] % 2:
            reader.mark_consumed([cut])
    (known,) = reader.state_dict()["epochs"].values()
    assert sum(len(row) - 1 for row in known["unused"]) <= 6


def test_padding_is_not_waited_for(dataset):
    """Its cuts belong to other parts too, which would read them again."""
    readers = [cuts.data for cuts in parts(dataset, 3, tail="pad", block_size=4)]
    for reader in readers:
        reader.count_only_marked()
        reader.mark_consumed([cut for cut in reader if not cut.has_custom("shar_padding")])
    states = [reader.state_dict() for reader in readers]
    assert [known["unused"] for state in states for known in state["epochs"].values()] == [[], [], []]


def test_marked_padding_leaves_the_cut_itself_to_be_read(dataset):
    reader = next(cuts.data for cuts in parts(dataset, 3, tail="pad", block_size=4) if any(
        cut.has_custom("shar_padding") for cut in cuts
    ))  # fmt: skip
    reader.count_only_marked()
    cuts = list(reader)
    before = reader.state_dict()
    reader.mark_consumed([cut for cut in cuts if cut.has_custom("shar_padding")])
    assert reader.state_dict() == before


def test_marks_count_only_where_they_were_asked_for(dataset):
    reader = open_shar(dataset, []).data
    with raises(ConfigError, "inexact_state", "count_only_marked"):
        reader.mark_consumed(list(reader))
