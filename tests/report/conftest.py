"""A run and a dataset to report on, and the command line in this process."""

from __future__ import annotations

from unittest import mock

import pytest
from support.reported import DecodingToy, make_reported


@pytest.fixture(scope="session")
def reported(tmp_path_factory):
    """A project with run directory and dataset, whose texts are hostile; not to be changed by tests."""
    return make_reported(tmp_path_factory.mktemp("reported"))


@pytest.fixture(autouse=True, scope="session")
def toy():
    """The codec that made the codes is what is loaded, whatever its name: no model in any of these tests."""
    with mock.patch("sharmill.models.recorded.load_codec", return_value=DecodingToy()) as load:
        yield load
