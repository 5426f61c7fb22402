"""Tests of the division of speaker groups into units."""

import numpy as np
from hypothesis import given, strategies as st

from sharmill.engine.hashes import find_first
from sharmill.manifest import Segment, Utterance
from sharmill.match.groups import divide
from sharmill.stages.lines import offsets_of, write_part


def number(groups):
    """Return the first line of each line's group, given the names of the groups."""
    return np.array([groups.index(group) for group in groups], np.uint32)


def spans_of(groups, seconds, unit_seconds, max_group):
    """Return the line numbers of each span."""
    order = np.argsort(number(groups), kind="stable")
    in_order = np.array(seconds, np.float32)[order]
    spans = divide(in_order, number(groups)[order], unit_seconds=unit_seconds, max_group=max_group)
    return [order[start:stop].tolist() for start, stop in spans]


@given(groups=st.lists(st.text("abc", max_size=2), max_size=40))
def test_groups_are_those_of_their_keys(groups, tmp_path_factory):
    path = tmp_path_factory.mktemp("groups") / "m.json"
    tag = "| Language:en Dataset:Tests Speaker:x |"
    utterances = [Utterance(Segment(0, f"{group}/1", 0.0, 1.0, False), "", tag) for group in groups]
    lines = write_part(path, utterances, lambda utterance: utterance.segment.audio_filepath.split("/")[0])
    assert find_first(*lines["group"].T).tolist() == number(groups).tolist()
    ends = np.cumsum([len(line) for line in path.read_bytes().splitlines(keepends=True)])
    assert offsets_of(lines["length"]).tolist() == [0, *ends.tolist()][:-1]


def test_groups_are_gathered_up_to_the_wanted_length():
    assert spans_of("aabbccd", [2] * 7, 8.0, None) == [[0, 1, 2, 3], [4, 5, 6]]


@given(
    groups=st.lists(st.sampled_from("abcdefgh"), max_size=60),
    unit_seconds=st.floats(0.1, 50),
    max_group=st.none() | st.integers(2, 10),
    data=st.data(),
)
def test_lines_of_a_group_share_a_span_unless_it_is_too_large(groups, unit_seconds, max_group, data):
    size = len(groups)
    seconds = data.draw(st.lists(st.floats(0.125, 20, width=32), min_size=size, max_size=size))
    lines = spans_of(groups, seconds, unit_seconds, max_group)
    assert sorted(line for span in lines for line in span) == list(range(size))
    assert all(lines)
    for span in lines:
        if len({groups[line] for line in span}) > 1:
            assert sum(seconds[line] for line in span) <= unit_seconds + 1e-2
    for group in set(groups):
        size = groups.count(group)
        parts = [[groups[line] for line in span] for span in lines if group in [groups[line] for line in span]]
        if max_group is None or size <= max_group:
            assert len(parts) == 1
        else:
            assert all(set(part) == {group} and len(part) <= max_group for part in parts)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
