"""Differences between two JSON values."""

from __future__ import annotations

import pytest

from sharmill.engine.identity import find_changes, find_differences


def test_the_innermost_places_are_named():
    old = {"a": {"b": [1, {"c": 2}]}, "same": "x"}
    new = {"a": {"b": [1, {"c": 3}]}, "same": "x"}
    assert find_changes(old, new) == ["a.b[1].c is 3, was 2"]


@pytest.mark.parametrize(("old", "new"), [({"a": None}, {}), ({}, {"a": None})])
def test_a_key_that_is_absent_is_not_one_that_is_null(old, new):
    (found,) = find_differences(old, new)
    assert found.path == "a"


@pytest.mark.parametrize(("old", "new"), [(1, True), (0, False), (1, 1.0), ("1", 1)])
def test_values_of_other_types_differ(old, new):
    assert len(list(find_differences({"a": old}, {"a": new}))) == 1


def test_lists_of_other_lengths_differ_as_a_whole():
    (found,) = find_differences([1], [1, 2])
    assert (found.path, found.old, found.new) == ("", [1], [1, 2])


def test_long_values_are_cut():
    (phrase,) = find_changes({"a": "x" * 100}, {"a": 1})
    assert phrase == f'a is 1, was "{"x" * 56}...'
