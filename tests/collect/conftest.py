"""One import of lhotse, and so of torch, for the processes of all recipes."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported_lhotse():
    multiprocessing.set_forkserver_preload(["lhotse.recipes", "sharmill.collect.complete"])
    forkserver.ensure_running()
