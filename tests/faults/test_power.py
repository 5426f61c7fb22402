"""Power that goes at any moment: readers get nothing bad, and a relaunch brings the same bytes.

Each test is a process of its own, into which the library that records is preloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from support.disk import FaultyDisk
from support.paths import TESTS

SEED = 20


@pytest.fixture(scope="module")
def cut_power(tmp_path_factory):
    """Returns a function: options of power.py -> the last number that it prints, of states or of places."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    disk = FaultyDisk(tmp_path_factory.mktemp("faulty_disk"))

    def cut(*options):
        command = [sys.executable, str(TESTS / "faults/power.py"), "--seed", str(SEED), *options]
        environment = os.environ | disk.environment()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return int(re.findall(r"^(\d+) (?:distinct states|of \d+ places)", done.stdout, re.MULTILINE)[-1])

    return cut


def test_an_index_that_is_made_again_survives(cut_power):
    assert cut_power("--runs", "index", "--states", "40") >= 40


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kind_of_run_survives(cut_power):
    # Without ranks that start anew, which take 20 s, and what the others have: single stages, the pipeline by itself.
    runs = ("append", "merge", "sidecars", "export", "calibrate", "train", "train example", "manifest",
            "split", "redo", "redo codes", "add codec", "ray", "chain of jobs", "restart")  # fmt: skip
    assert cut_power("--states", "12", "--minutes", "25", "--runs", *runs) >= 12 * len(runs)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_something_breaks_without_each_fsync(cut_power):
    runs = ("append", "sidecars", "export", "calibrate", "train", "manifest", "prepare", "write", "encode", "split",
            "findings", "redo")  # fmt: skip
    assert cut_power("--without-syncs", "--states", "24", "--runs", *runs) >= 60
