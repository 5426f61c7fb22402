"""The small run whose stages are killed, and whose disk fails."""

import pytest
from faults.runs import SmallRun


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Of 32 good utterances in many small units; put back before use, by ``restore``."""
    return SmallRun(tmp_path_factory.mktemp("small_run"))
