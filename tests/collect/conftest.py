"""Import lhotse, and so torch, only once for the processes of all recipes."""

import multiprocessing
from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported_lhotse():
    multiprocessing.set_forkserver_preload(["lhotse.recipes", "sharmill.collect.manifest"])
    forkserver.ensure_running()
