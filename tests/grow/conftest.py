"""Datasets that several tests only read."""

from __future__ import annotations

import pytest
from support.growing import make_dataset


@pytest.fixture(scope="session")
def coded(tmp_path_factory):
    """Two datasets with the codec a, of 2 and of 3 voices."""
    folder = tmp_path_factory.mktemp("coded")
    return [make_dataset(folder / name, name, voices, codecs="a").dataset for name, voices in (("x", 2), ("y", 3))]


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Three datasets without codes."""
    folder = tmp_path_factory.mktemp("plain")
    return [make_dataset(folder / name, name).dataset for name in "pqr"]
