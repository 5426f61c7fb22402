"""The benchmarks for a GPU, tried out on the CPU with small models."""

import json
import subprocess
import sys

import pytest
from support.project import TESTS


@pytest.mark.slow
def test_stages_are_measured_beside_their_models(tmp_path):
    report, row = tmp_path / "found.json", "model's share of stages"
    command = [sys.executable, TESTS / "bench_gpu", "--device", "cpu", "--json", report, "--rows", row]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no figures for GPUs" in done.stdout
    lines = json.loads(report.read_text())["rows"][row]["lines"]
    stages = [(line["stage"], line["precision"]) for line in lines]
    assert stages == [("match", "fp32"), ("match", "bf16"), ("encode", "fp32"), ("encode", "bf16")]
    assert all(line["hours per hour"] > 0 for line in lines)
