"""The starter of ranks: on SIGTERM they have the time that they need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from support.paths import REPOSITORY

# Leaves as late after SIGTERM as a rank that saves: when it is told to.
RANK = """
import signal, sys
def save(number, frame):
    print("saving", flush=True)
    sys.stdin.readline()
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
signal.pause()
"""
# start_ranks.py, with a torch that gives ranks no time at all.
STARTER = """
import runpy, sys
from torch.distributed.elastic.multiprocessing.api import PContext
PContext.close.__defaults__ = (None, 0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_rank_may_save_for_longer_than_torch_would_wait(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    options = ["--nnodes=1", "--node-rank=0", "--nproc-per-node=1", "--rdzv-backend=bound", "--rdzv-conf=rank=0"]
    command = [sys.executable, "-c", STARTER, str(REPOSITORY / "jobs/start_ranks.py"), *options]
    command += ["--rdzv-endpoint=127.0.0.1:0", str(tmp_path / "rank.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe) as starter:
        assert starter.stdout.readline() == "begun\n"
        starter.send_signal(signal.SIGTERM)
        assert starter.stdout.readline() == "saving\n"
        said, _ = starter.communicate("go on\n", timeout=120)
    assert said == "saved\n"
    assert starter.returncode == 0
