"""The published layout is known to those that make or use its fields, and to no other module."""

from __future__ import annotations

import ast

from support.paths import REPOSITORY

# What any module may take from the layout: nothing of it is about a certain field.
OF_ANY_DATASET = {"CUTS", "DATASET_FILE", "SHARDS_FILE", "FORMAT_VERSION", "Field", "sidecar_files", "sorted_fields"}
# The dataset itself, and what uses its target and context.
ROOMS = {"shar", "training", "export", "report"}
# Stages that publish these fields, the check that makes them again, and Shars of other tools, which have no layout.
MODULES = {
    "encode/assemble.py", "encode/stage.py", "sources/lhotse_shar.py", "validate/contract.py",
    "validate/foreign.py", "write/fields.py", "write/stage.py",
}  # fmt: skip


def test_only_those_that_make_or_use_the_published_fields_know_them():
    source = REPOSITORY / "src/sharmill"
    importers = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_layout = isinstance(node, ast.ImportFrom) and node.module == "sharmill.shar.layout"
            if is_layout and {name.name for name in node.names} - OF_ANY_DATASET:
                importers.add(path.relative_to(source).as_posix())
    assert {path for path in importers if path.partition("/")[0] not in ROOMS} <= MODULES
