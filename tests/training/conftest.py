"""Datasets that the training tests share and do not modify."""

import pytest
import torch
from support.training import make_corpora, make_nemo_data


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """Two datasets with codes, text and conversations; see ``Corpora``."""
    return make_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="session")
def nemo_data(tmp_path_factory):
    """A folder of text, manifests and tars; see ``make_nemo_data``."""
    return make_nemo_data(tmp_path_factory.mktemp("nemo_data"))


@pytest.fixture(autouse=True)
def _workers_end_soon(monkeypatch):
    """Make a failed loader wait half a second for its workers instead of five."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
