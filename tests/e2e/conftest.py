"""Whole pipelines as users start them: the command line in a process of its own, on a small synthetic corpus."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

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


def shar_fields(directory: Path, codec: str | None = None) -> dict[str, list[str]]:
    """The files of a dataset as ``lhotse.CutSet.from_shar`` takes them."""
    folders = {"cuts": "cuts", "target_audio": "target_audio", "context_audio": "context_audio"}
    if codec is not None:
        folders |= {name: f"codes_{codec}/{name}" for name in ("target_codes", "context_codes")}
    return {name: [str(path) for path in sorted((directory / folder).iterdir())] for name, folder in folders.items()}


@pytest.fixture
def lhotse_cuts():
    """Returns a function: dataset directory, codec -> the cuts as plain lhotse reads them."""
    from lhotse import CutSet

    def read(directory: Path, codec: str | None = None) -> CutSet:
        return CutSet.from_shar(fields=shar_fields(directory, codec))

    return read
