"""Power that goes at any moment: readers get nothing bad, and a relaunch brings the same bytes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.paths import TESTS
from support.power_runs import RUNS


@pytest.fixture
def cut_power():
    """Returns a function: options of power.py -> its exit status, and how many states there were."""

    def cut(*options):
        command = [sys.executable, str(TESTS / "faults/power.py"), "--seed", "20", *options]
        environment = os.environ | {"PYTHONPATH": str(TESTS)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        rows = re.findall(r"^[\w ]+ \| \d+ \| (\d+) ", done.stdout, re.MULTILINE)
        return done.returncode, sum(map(int, rows))

    return cut


def test_an_index_that_is_made_again_survives(cut_power):
    assert cut_power("--runs", "index", "--states", "40") == (0, 40)


def test_an_fsync_that_is_left_out_is_found(cut_power):
    site = "storage.open_atomic < index.write_shards"
    assert cut_power("--runs", "index", "--states", "40", "--without", site) == (1, 40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_run_survives(cut_power):
    assert cut_power("--states", "24", "--minutes", "25") == (0, 24 * len(RUNS))
