"""The API reference: what it lists exists, and the examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import importlib
import re

import pytest
from support.paths import REPOSITORY

SOURCE = REPOSITORY / "src"
REFERENCE = "".join(page.read_text() for page in (REPOSITORY / "docs/reference").glob("*.md"))
LISTED = re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE)
# Examples that need a large dataset or a cluster say +SKIP; the pages show the same on small ones.
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if re.search(r"^ *>>> (?!.*SKIP)", path.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("name", LISTED)
def test_what_the_reference_lists_exists(name):
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:count])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.exists():
            break
    body, rest = ast.parse(file.read_text()).body, parts[count:]
    defined = {alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    defined |= {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert not rest or rest[0] in defined


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_run(name, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
