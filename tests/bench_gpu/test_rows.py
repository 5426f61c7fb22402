"""The benchmarks for a GPU, tried out on the CPU with small models."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.paths import TESTS


@pytest.fixture
def bench_gpu(tmp_path):
    """Returns a function: arguments -> what the command has found on the CPU, by row."""

    def run(*arguments):
        command = [
            sys.executable,
            TESTS / "bench_gpu",
            "--device",
            "cpu",
            "--json",
            tmp_path / "found.json",
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "no figures for GPUs" in done.stdout
        return json.loads((tmp_path / "found.json").read_text())["rows"]

    return run


@pytest.mark.slow
def test_stages_are_measured_beside_their_models(bench_gpu):
    found = bench_gpu("--rows", "model's share of stages")
    lines = found["model's share of stages"]["lines"]
    stages = [(line["stage"], line["precision"]) for line in lines]
    assert stages == [("match", "fp32"), ("match", "bf16"), ("encode", "fp32"), ("encode", "bf16")]
    assert all(line["hours per hour"] > 0 for line in lines)


@pytest.mark.slow
def test_rows_for_which_no_time_is_left_say_so(bench_gpu):
    found = bench_gpu("--seconds", "0")
    assert len(found) == 5
    assert all("left out" in line for row in found.values() for line in row["lines"])
