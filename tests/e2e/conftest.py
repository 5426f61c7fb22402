"""Whole pipelines as users start them: the command line in a process of its own, on a small synthetic corpus."""

from __future__ import annotations

import os
import subprocess

import pytest
from support.paths import REPOSITORY
from support.pipelines import command


@pytest.fixture
def start_sharmill():
    """Returns a function that starts the command line in a process group of its own."""
    started: list[subprocess.Popen] = []

    def start(*arguments) -> subprocess.Popen:
        process = subprocess.Popen(
            command(*arguments),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=REPOSITORY,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.wait()
