"""The small run for tests of killed stages and of a failing disk."""

import pytest
from faults.runs import SmallRun


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """A run of 32 good utterances in many small units; call ``restore`` before use."""
    return SmallRun(tmp_path_factory.mktemp("small_run"))
