"""Gives the tests of this folder ``dummies_shar``, which lies in tests/shar, and the fixtures made from it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

if "dummies_shar" not in sys.modules:
    _SPEC = importlib.util.spec_from_file_location(
        "dummies_shar", Path(__file__).parents[1] / "shar" / "dummies_shar.py"
    )
    assert _SPEC is not None
    assert _SPEC.loader is not None
    sys.modules["dummies_shar"] = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(sys.modules["dummies_shar"])

from dummies_shar import Project, voice


@pytest.fixture
def project(tmp_path):
    """An empty project."""
    return Project(tmp_path)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A dataset of 7 cuts in 3 shards with the codes of a toy codec; not to be changed by tests.

    Cut n has the context n + 1; some contexts are longer than their targets and some are shorter.
    """
    project = Project(tmp_path_factory.mktemp("built"))
    for number, seconds in enumerate([1.0, 2.005, 0.5, 3.1, 0.7, 1.3, 0.25]):
        project.add(f"spk/utt{number}.flac", voice(seconds, pitch=150 + 20 * number, seed=number), number=number)
    config = project.write(write={"shard_size": 3, "order": "manifest"}, match={"min_duration": 0.0})
    project.encode(config)
    return project
