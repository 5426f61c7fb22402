"""The page on pipelines and the README: all of their Python code runs, in its order, as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.paths import REPOSITORY

PAGE = REPOSITORY / "src/sharmill/training/README.md"
README = REPOSITORY / "README.md"


def run_blocks(page: Path) -> dict[str, Any]:
    """Runs the ``python`` blocks of a page, and returns the names that they leave."""
    text = page.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == text.count("```python")
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        # With its place in the file, so that a failure points into the page.
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)
    return namespace


@pytest.fixture
def in_page_folder(built, many, tmp_path, monkeypatch):
    """A folder with the datasets that the pages name."""
    for name, project in (("data/pairs", built), ("data/speech", many), ("demo/dataset", built)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(project.dataset)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_page_folder")
def test_the_page_runs():
    run_blocks(PAGE)


@pytest.mark.usefixtures("in_page_folder")
def test_the_readme_runs():
    names = run_blocks(README)
    for batch in (names["batch"], next(iter(names["loader"]))):
        assert batch["target_codes"].shape[1] == 3
        assert batch["ids"]
    names["Step"]()(2, 0.5, None, "cpu")
