"""The order of the cuts: values, seeds, and independence of the speaker groups."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sharmill.write.order import MatchedIndex, index_matched, order_lines


def index_of(positions):
    count = len(positions)
    return MatchedIndex(np.arange(count) * 10, np.array(positions, dtype=np.int64), np.ones(count))


@given(st.permutations(range(20)), st.integers(0, 5))
def test_every_order_is_a_permutation_and_only_speaker_depends_on_the_groups(positions, seed):
    index, sorted_index = index_of(positions), index_of(sorted(positions))
    assert order_lines(index, "speaker", seed).tolist() == list(range(20))
    for order in ("manifest", "shuffle"):
        found = index.positions[order_lines(index, order, seed)].tolist()
        assert sorted(found) == list(range(20))
        assert found == sorted_index.positions[order_lines(sorted_index, order, seed)].tolist()


def test_manifest_is_the_order_of_the_input():
    assert order_lines(index_of([4, 0, 2]), "manifest", 0).tolist() == [1, 2, 0]


def test_the_shuffle_is_the_documented_permutation():
    expected = np.random.Generator(np.random.PCG64(42)).permutation(7).tolist()
    assert order_lines(index_of(range(7)), "shuffle", 42).tolist() == expected
    assert order_lines(index_of(range(7)), "shuffle", 43).tolist() != expected


def test_nothing_has_an_order():
    for order in ("manifest", "speaker", "shuffle"):
        assert order_lines(index_of([]), order, 1).tolist() == []


def test_the_index_has_positions_offsets_and_seconds(tmp_path):
    path = tmp_path / "m.json"
    records = [{"_index": 5, "duration": 1.5, "context_audio_duration": 3.0, "x": "ü" * n} for n in range(3)]
    lines = [json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records]
    path.write_bytes(b"".join(lines))
    index = index_matched(path)
    assert index.offsets.tolist() == [0, len(lines[0]), len(lines[0]) + len(lines[1])]
    assert index.positions.tolist() == [5, 5, 5]
    assert index.seconds.tolist() == [4.5] * 3
