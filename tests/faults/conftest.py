"""The small run whose stages are killed, and whose disk fails."""

from __future__ import annotations

import pytest
from support.small_run import SmallRun


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Of 32 good utterances in many small units; put back before use, by ``restore``."""
    return SmallRun(tmp_path_factory.mktemp("small_run"))
