"""The order of the cuts: values, seeds, and independence of the speaker groups; their division into shards."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharmill.write.config import WriteConfig
from sharmill.write.order import LineIndex, divide_into_shards, index_matched, index_prepared, order_lines

DURATIONS = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40).map(np.array)


def index_of(positions):
    count = len(positions)
    return LineIndex(np.arange(count) * 10, np.array(positions, dtype=np.int64), np.ones(count), np.ones(count))


@given(st.permutations(range(20)), st.integers(0, 5))
def test_every_order_is_a_permutation_and_only_speaker_depends_on_the_groups(positions, seed):
    index, sorted_index = index_of(positions), index_of(sorted(positions))
    assert order_lines(index, "speaker", seed).tolist() == list(range(20))
    for name in ("manifest", "shuffle"):
        found = index.positions[order_lines(index, name, seed)].tolist()
        assert sorted(found) == list(range(20))
        assert found == sorted_index.positions[order_lines(sorted_index, name, seed)].tolist()


def test_manifest_is_the_order_of_the_input():
    assert order_lines(index_of([4, 0, 2]), "manifest", 0).tolist() == [1, 2, 0]


def test_the_shuffle_is_the_documented_permutation():
    expected = np.random.Generator(np.random.PCG64(42)).permutation(7).tolist()
    assert order_lines(index_of(range(7)), "shuffle", 42).tolist() == expected
    assert order_lines(index_of(range(7)), "shuffle", 43).tolist() != expected


@given(st.lists(st.integers(0, 60), max_size=60))
def test_the_order_is_that_of_a_stable_sort(positions):
    found = order_lines(index_of(positions), "manifest", 0)
    assert found.tolist() == np.argsort(positions, kind="stable").tolist()


def test_nothing_has_an_order():
    for name in ("manifest", "speaker", "shuffle"):
        assert order_lines(index_of([]), name, 1).tolist() == []


def test_the_index_has_positions_offsets_and_seconds(tmp_path):
    path = tmp_path / "m.json"
    records = [{"_index": 5, "duration": 1.5, "context_audio_duration": 3.0, "x": "ü" * n} for n in range(3)]
    lines = [json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records]
    path.write_bytes(b"".join(lines))
    index = index_matched(path)
    assert index.offsets.tolist() == [0, len(lines[0]), len(lines[0]) + len(lines[1])]
    assert index.positions.tolist() == [5, 5, 5]
    assert index.target_seconds.tolist() == [1.5] * 3
    assert index.seconds.tolist() == [4.5] * 3


def test_the_index_of_a_prepared_manifest_has_its_lines_by_speaker(tmp_path):
    path = tmp_path / "m.json"
    speakers = ["b", "unknown", "b", "a"]
    records = [
        {
            "audio_filepath": f"{number}.wav", "duration": 1.0 + number, "_index": -1, "context_audio_duration": "x",
            "speaker": f"| Language:en Dataset:d Speaker:{speaker} |",
        }
        for number, speaker in enumerate(speakers)
    ]  # fmt: skip
    lines = [json.dumps(record).encode() + b"\n" for record in records]
    path.write_bytes(b"".join(lines))
    index = index_prepared(path)
    assert index.positions.tolist() == [0, 2, 1, 3]
    assert index.offsets.tolist() == [sum(map(len, lines[:number])) for number in (0, 2, 1, 3)]
    assert index.target_seconds.tolist() == index.seconds.tolist() == [1.0, 3.0, 2.0, 4.0]
    assert order_lines(index, "manifest", 0).tolist() == [0, 2, 1, 3]


def sizes(bounds):
    return np.diff(bounds).tolist()


@given(DURATIONS, st.integers(1, 50))
def test_shards_of_a_size(seconds, size):
    found = sizes(divide_into_shards(seconds, WriteConfig(shard_size=size)))
    assert sum(found) == len(seconds)
    assert set(found[:-1]) <= {size}
    assert 1 <= found[-1] <= size


@given(DURATIONS, st.integers(1, 50))
def test_a_number_of_shards_whose_sizes_differ_by_one_at_most(seconds, number):
    found = sizes(divide_into_shards(seconds, WriteConfig(num_shards=number)))
    assert sum(found) == len(seconds)
    assert len(found) == min(number, len(seconds))
    assert max(found) - min(found) <= 1
    assert min(found) >= 1


@given(DURATIONS, st.floats(0.01, 500.0))
def test_shards_of_seconds_are_as_many_as_asked_for_and_none_is_empty(seconds, wanted):
    bounds = divide_into_shards(seconds, WriteConfig(shard_seconds=wanted))
    assert (bounds[0], bounds[-1]) == (0, len(seconds))
    assert min(sizes(bounds)) >= 1
    assert len(bounds) - 1 == min(len(seconds), max(1, round(float(seconds.sum()) / wanted)))
    assert divide_into_shards(seconds, WriteConfig(shard_seconds=wanted)) == bounds


@given(st.lists(st.floats(1.0, 2.0), min_size=20, max_size=60).map(np.array), st.integers(2, 6))
def test_shards_of_seconds_end_nearest_to_equal_shares(seconds, number):
    total = float(seconds.sum())
    bounds = divide_into_shards(seconds, WriteConfig(shard_seconds=total / number))
    so_far = np.concatenate([[0.0], np.cumsum(seconds)])
    assert len(bounds) == number + 1
    for shard, bound in enumerate(bounds):
        share = total * shard / number
        assert abs(so_far[bound] - share) <= np.abs(so_far - share).min() + 1e-9


@pytest.mark.parametrize(
    ("seconds", "wanted", "bounds"),
    [
        ([4.0, 1.0, 1.0, 1.0, 1.0], 4.0, [0, 1, 5]),
        ([1.0, 1.0, 1.0, 1.0, 4.0], 4.0, [0, 4, 5]),
        ([1.0, 2.0, 1.0], 2.0, [0, 1, 3]),  # the first of two bounds as near
        ([100.0, 1.0, 1.0, 1.0], 25.75, [0, 1, 2, 3, 4]),  # the first is longer than all others together
        ([1.0, 1.0, 1.0, 100.0], 25.75, [0, 1, 2, 3, 4]),
        ([1.0], 1e-9, [0, 1]),
        ([0.0, 0.0], 5.0, [0, 2]),
        ([3.0, 3.0], 1e9, [0, 2]),
    ],
)
def test_bounds_of_shards_of_seconds(seconds, wanted, bounds):
    assert divide_into_shards(np.array(seconds), WriteConfig(shard_seconds=wanted)) == bounds


@pytest.mark.parametrize("key", ["shard_size", "num_shards", "shard_seconds"])
def test_nothing_is_divided_into_no_shard(key):
    assert divide_into_shards(np.empty(0), WriteConfig(**{key: 3})) == [0]
