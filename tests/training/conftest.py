"""Datasets that training tests read and do not change."""

from __future__ import annotations

import pytest
from support.corpora import make_corpora


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """Two datasets with codes, text and conversations: see ``Corpora``."""
    return make_corpora(tmp_path_factory.mktemp("corpora"))
