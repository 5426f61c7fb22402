"""Datasets that training tests read and do not change."""

import pytest
import torch
from support.training import make_corpora, make_nemo_data


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """Two datasets with codes, text and conversations: see ``Corpora``."""
    return make_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="session")
def nemo_data(tmp_path_factory):
    """A folder of text, manifests and tars: see ``make_nemo_data``."""
    return make_nemo_data(tmp_path_factory.mktemp("nemo_data"))


@pytest.fixture(autouse=True)
def _workers_end_soon(monkeypatch):
    """Let a loader that has failed wait half a second for its workers, rather than five."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
