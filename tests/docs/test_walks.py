"""The walks of the page on architecture: every file and name in them exists."""

from __future__ import annotations

import ast
import re

import pytest
from support.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "architecture.md"
STOPS = sorted(set(re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE.read_text())))


def test_there_are_walks():
    assert len(STOPS) > 30


@pytest.mark.parametrize(("file", "name"), STOPS, ids=[":".join(stop) for stop in STOPS])
def test_the_name_is_defined_in_the_file(file, name):
    body = ast.parse((REPOSITORY / "src/sharmill" / file).read_text()).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{file} does not define {name}"
        body = getattr(found[0], "body", [])
