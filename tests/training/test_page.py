"""The page on pipelines: all of its code runs, in its order, as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "src/sharmill/training/README.md"


def blocks():
    """The ``python`` blocks of the page, each with the line on which it begins."""
    text = PAGE.read_text()
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start(1)].count("\n"), match[1]


@pytest.fixture
def in_page_folder(built, many, tmp_path, monkeypatch):
    """A folder with the two datasets of the page."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/pairs").symlink_to(built.dataset)
    (tmp_path / "data/speech").symlink_to(many.dataset)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_page_folder")
def test_the_page_runs():
    namespace = {"__name__": "page"}
    count = 0
    for line, block in blocks():
        # With its place in the file, so that a failure points into the page.
        exec(compile("\n" * line + block, str(PAGE), "exec"), namespace)
        count += 1
    assert count == PAGE.read_text().count("```python")
