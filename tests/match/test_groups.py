"""Speaker groups of a manifest and their division into units."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharmill.manifest import Utterance, write_lines
from sharmill.match.groups import ManifestIndex, divide, index_manifest


def key_of_folder(audio_filepath, speaker):
    return audio_filepath.split("/")[0]


def key_of_speaker(audio_filepath, speaker):
    return speaker


def make_index(groups, seconds):
    """The index of lines with these group names and durations, as ``index_manifest`` would number them."""
    first = [groups.index(group) for group in groups]
    return ManifestIndex(np.arange(len(groups)), np.array(seconds, np.float32), np.array(first, np.uint32))


def spans_of(index, unit_seconds, max_group):
    """The line numbers of each span, and the spans."""
    order = np.argsort(index.groups, kind="stable")
    spans = list(divide(index, order, unit_seconds=unit_seconds, max_group=max_group))
    return [order[span.start : span.stop].tolist() for span in spans], spans


@pytest.fixture
def prepared(tmp_path):
    """Returns a function: (path, speaker, duration) of utterances -> a prepared manifest."""

    def write(utterances):
        path = tmp_path / "m.json"
        tag = "| Language:en Dataset:Tests Speaker:{} |"
        write_lines(path, (Utterance(a, 0.0, d, "ü" * n, tag.format(s)).to_json()
                           for n, (a, s, d) in enumerate(utterances)))  # fmt: skip
        return path

    return write


UTTERANCES = [("x/1", "b", 1.5), ("y/2", "b", 2.0), ("x/3", "a", 2.5), ("z/4", "b", 3.0), ("y/5", "a", 3.5)]


@pytest.mark.parametrize(("group_key", "groups"), [(key_of_folder, [0, 1, 0, 3, 1]), (key_of_speaker, [0, 0, 2, 0, 2])])
def test_groups_are_numbered_by_their_first_line(group_key, groups, prepared):
    assert index_manifest(prepared(UTTERANCES), group_key).groups.tolist() == groups


def test_offsets_are_where_the_lines_begin(prepared):
    path = prepared(UTTERANCES)
    lines = path.read_bytes().splitlines(keepends=True)
    assert index_manifest(path, key_of_folder).offsets.tolist() == [
        sum(map(len, lines[:number])) for number in range(len(lines))
    ]


def test_seconds_are_the_durations(prepared):
    assert index_manifest(prepared(UTTERANCES), key_of_folder).seconds.tolist() == [1.5, 2.0, 2.5, 3.0, 3.5]


def test_index_of_an_empty_manifest(prepared):
    index = index_manifest(prepared([]), key_of_folder)
    assert (len(index.offsets), len(index.seconds), len(index.groups)) == (0, 0, 0)
    assert spans_of(index, 10.0, None) == ([], [])


@given(groups=st.lists(st.text("abc", max_size=2), max_size=40))
def test_groups_are_those_of_their_keys(groups, tmp_path_factory):
    path = tmp_path_factory.mktemp("groups") / "m.json"
    tag = "| Language:en Dataset:Tests Speaker:x |"
    write_lines(path, (Utterance(f"{group}/1", 0.0, 1.0, "", tag).to_json() for group in groups))
    index = index_manifest(path, key_of_folder)
    assert index.groups.tolist() == make_index(groups, [1.0] * len(groups)).groups.tolist()


def test_groups_are_gathered_up_to_the_wanted_length():
    index = make_index("aabbccd", [2, 2, 2, 2, 2, 2, 2])
    lines, spans = spans_of(index, 8.0, None)
    assert lines == [[0, 1, 2, 3], [4, 5, 6]]
    assert [span.seconds for span in spans] == [8.0, 6.0]


def test_a_group_that_is_too_long_is_a_span_of_its_own():
    lines, _ = spans_of(make_index("abbbc", [1, 9, 9, 9, 1]), 10.0, None)
    assert lines == [[0], [1, 2, 3], [4]]


def test_a_group_that_is_too_large_is_divided_into_nearly_equal_parts():
    lines, _ = spans_of(make_index("a" + "b" * 7 + "c", [1] * 9), 100.0, 3)
    assert lines == [[0], [1, 2], [3, 4], [5, 6, 7], [8]]


def test_four_speakers_give_work_to_many_ranks():
    lines, _ = spans_of(make_index("abcd" * 1000, [1] * 4000), 1e9, 250)
    assert [len(part) for part in lines] == [250] * 16


DIVISIONS = {
    "groups": st.lists(st.sampled_from("abcdefgh"), max_size=60),
    "unit_seconds": st.floats(0.1, 50),
    "max_group": st.none() | st.integers(2, 10),
    "data": st.data(),
}


def draw_index(groups, data):
    seconds = data.draw(st.lists(st.floats(0.125, 20, width=32), min_size=len(groups), max_size=len(groups)))
    return make_index(groups, seconds)


@given(**DIVISIONS)
def test_every_line_is_in_one_span(groups, unit_seconds, max_group, data):
    lines, _ = spans_of(draw_index(groups, data), unit_seconds, max_group)
    assert sorted(line for span in lines for line in span) == list(range(len(groups)))
    assert all(lines)


@given(**DIVISIONS)
def test_a_group_is_in_one_span_unless_it_is_too_large(groups, unit_seconds, max_group, data):
    lines, _ = spans_of(draw_index(groups, data), unit_seconds, max_group)
    for group in set(groups):
        size = groups.count(group)
        parts = [[groups[line] for line in span] for span in lines if group in [groups[line] for line in span]]
        if max_group is None or size <= max_group:
            assert len(parts) == 1
        else:
            assert all(set(part) == {group} and len(part) <= max_group for part in parts)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(**DIVISIONS)
def test_spans_of_several_groups_are_not_longer_than_asked(groups, unit_seconds, max_group, data):
    index = draw_index(groups, data)
    lines, spans = spans_of(index, unit_seconds, max_group)
    for span, numbers in zip(spans, lines, strict=True):
        assert span.seconds == pytest.approx(float(index.seconds[numbers].sum()), abs=1e-2)
        if len({groups[line] for line in numbers}) > 1:
            assert span.seconds <= unit_seconds + 1e-2
