"""The list of abilities names tests that exist."""

from __future__ import annotations

import re

import pytest
from support.paths import REPOSITORY, TESTS

LINES = [line for line in (TESTS / "ABILITIES.md").read_text().splitlines() if line.startswith("- ")]


@pytest.mark.parametrize("line", LINES)
def test_what_shows_an_ability_is_there(line):
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", line)
    assert named
    for path, name in named:
        assert f"def {name or 'test_'}" in (REPOSITORY / path).read_text(), path
