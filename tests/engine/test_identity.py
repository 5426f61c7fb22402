"""Differences between two identities, in words."""

from __future__ import annotations

import pytest

from sharmill.engine.identity import find_changes


@pytest.mark.parametrize(
    ("old", "new", "clauses"),
    [
        ({"a": {"b": [1, {"c": 2}]}, "same": "x"}, {"a": {"b": [1, {"c": 3}]}, "same": "x"}, ["a.b[1].c is 3, was 2"]),
        ({"a": {"x": 1}}, {"a": {"y": None}}, ["a.x is absent, was 1", "a.y is null, was absent"]),
        ({"a": 1}, {"a": True}, ["a is true, was 1"]),
        ({"a": 1}, {"a": 1.0}, ["a is 1.0, was 1"]),
        ({"a": [1]}, {"a": [1, 2]}, ["a is [1,2], was [1]"]),
        ({"a": "x" * 100}, {"a": 1}, [f'a is 1, was "{"x" * 56}...']),
        ({"input": [{"size": 1, "sum": 2}]}, {"input": [{"size": 3, "sum": 4}]}, ["the input has other content"]),
    ],
)
def test_each_innermost_difference_is_a_clause(old, new, clauses):
    assert find_changes(old, new) == clauses
