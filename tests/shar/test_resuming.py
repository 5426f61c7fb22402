"""The order of an epoch and its parts; every cut is read exactly once, whatever interruptions and ranks there are."""

import json
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.project import examples, make_bare_dataset, numbers, raises

from sharmill.errors import ConfigError
from sharmill.shar import merge_states, open_shar
from sharmill.shar.reading.state import Order, count_blocks
from sharmill.shar.sidecars import write_sidecars

COUNTS = [7, 30, 1, 0, 12, 30, 5, 23]
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    dataset = make_bare_dataset(tmp_path_factory.mktemp("resuming") / "dataset", COUNTS)
    write_sidecars(dataset)
    return dataset


def parts(dataset, count, state=None, **options):
    """Return a reader for each of ``count`` parts."""
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


@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize("seed", range(40))
def test_every_cut_comes_once_per_epoch_despite_interruptions(dataset, seed, ahead):
    rng = random.Random(seed)
    options = {"shuffle": True, "seed": seed, "mix_shards": rng.choice([1, 3, 8]), "infinite": True, "block_size": 1}
    used, state = Counter(), None
    while state is None or state["epoch"] < 2:
        count = rng.randint(1, 8) * max(1, rng.randint(0, 3))
        readers = [cuts.data for cuts in parts(dataset, count, state, **options)]
        for reader in readers if ahead else ():
            reader.count_only_marked()
        streams, buffers = [iter(reader) for reader in readers], [[] for _ in readers]
        for _ in range(rng.randint(0, TOTAL)):
            # The buffer yields in any order, as shuffling and buckets do.
            rank = rng.randrange(count)
            while len(buffers[rank]) <= ahead:
                buffers[rank].append(next(streams[rank]))
            cut = buffers[rank].pop(rng.randint(0, ahead))
            used[cut.shar_position[0], cut.id] += 1
            if ahead:
                readers[rank].mark_consumed([cut])
        state = merge_states([reader.state_dict() for reader in readers])
    assert set(used.values()) == {1}
    assert [Counter(epoch for epoch, _ in used)[epoch] for epoch in range(2)] == [TOTAL, TOTAL]
    assert ahead or len(json.dumps(state)) < 20_000


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


def test_states_that_do_not_belong_together_are_refused(dataset, tmp_path):
    states, halves = ([reader.data.state_dict() for reader in parts(dataset, count)] for count in (3, 2))
    for wrong, words in (
        ([states[0], states[2]], "part 1 of 3"),
        ([*states, states[1]], "twice"),
        ([merge_states(states)], "merged state"),
        ([], "no state"),
        ([*states, *halves], "part 0 of 2"),
    ):
        with raises(ConfigError, "wrong_state", words):
            merge_states(wrong)
    merged, shuffled = merge_states(states), open_shar(dataset, [], shuffle=True).data.state_dict()
    other = make_bare_dataset(tmp_path, [3, 3])
    for opened, options, state, words in (
        (dataset, {"shuffle": True}, merged, "shuffle"),
        (dataset, {"shuffle": True, "seed": 1}, shuffled, "seed: 0 and 1"),
        (other, {}, merged, "num_cuts"),
        (dataset, {}, {"version": 1}, "not the state of a Shar reader"),
        (dataset, {}, {"version": 7}, "version 7"),
    ):
        with raises(ConfigError, "wrong_state", words):
            open_shar(opened, [], **options).data.load_state_dict(state)
    reader = open_shar(dataset, [])
    reader.data.load_state_dict(states[1])
    with raises(ConfigError, "wrong_state", "merge_states"):
        list(reader)


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
        {"on_damage": "ignore"},
        {"max_damaged": -1, "on_damage": "skip"},
        {"max_damaged": 5},
        {"sidecars": "index"},
        {"sidecars": "index", "shuffle": True},
        {"tail": "pad", "on_damage": "skip"},
    ],
)
def test_options_that_make_no_sense_are_refused(dataset, options):
    with raises(ConfigError, "bad_config_value", next(iter(options))):
        open_shar(dataset, [], **options)


def test_the_order_is_fixed_for_all_times():
    order = Order(10, count_blocks(10, 5, 2), shuffle=True, seed=42, mix_shards=4)
    assert order.permutation(3).tolist() == [7, 4, 5, 6, 8, 0, 1, 3, 9, 2]
    assert order.positions(3, 1, 3).draws.tolist() == [3382524837571898, 1526206355727367, 3220001052938495]


def test_seed_and_epoch_change_the_order():
    def permutation(seed, epoch):
        return Order(50, 1, shuffle=True, seed=seed).permutation(epoch).tolist()

    found = {tuple(permutation(seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(found) == 25


def owners(order: Order, epoch: int, counts: np.ndarray, num_parts: int) -> np.ndarray:
    """The part of each cut, in the order of the dataset."""
    found = [np.zeros(0, np.int64)] * len(counts)
    for slot, shard in enumerate(order.permutation(epoch).tolist()):
        found[shard] = order.positions(epoch, slot, int(counts[shard])).blocks % num_parts
    return np.concatenate(found)


UNEVEN = np.random.default_rng(0).integers(1, 49, 100)
SPLITS = [
    (np.full(4, 1000), 8),  # cut by cut
    (np.full(400, 1000), 11),  # blocks do not divide shards evenly, and parts divide the blocks of a shard
    (np.full(1000, 1000), 40),
    (1000 - np.arange(40) % 7, 8),
    (UNEVEN, 16),
]


@pytest.mark.parametrize(("counts", "num_parts"), SPLITS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_are_about_equal(counts, num_parts, shuffle):
    order = Order(len(counts), count_blocks(len(counts), int(counts.max()), None), shuffle, mix_shards=8)
    sizes = np.bincount(owners(order, 0, counts, num_parts), minlength=num_parts)
    assert sizes == pytest.approx(sizes.mean(), rel=0.02 if counts is not UNEVEN else 0.12)


@pytest.mark.parametrize(("counts", "num_parts"), SPLITS)
def test_shuffled_parts_have_other_cuts_in_every_epoch(counts, num_parts):
    order = Order(len(counts), count_blocks(len(counts), int(counts.max()), None), shuffle=True, mix_shards=8)
    first, second, third = (owners(order, epoch, counts, num_parts) for epoch in range(3))
    for one, other in ((first, second), (second, third), (first, third)):
        assert np.mean(one == other) == pytest.approx(1 / num_parts, abs=0.02)
    together = np.mean((second == second[0])[first == first[0]])
    assert together == pytest.approx(1 / num_parts, abs=0.12)
