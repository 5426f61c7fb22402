"""The benchmarks for a GPU, tried out on the CPU with small models."""

import json
import subprocess
import sys
from itertools import product

import pytest
from support.project import TESTS


@pytest.mark.slow
def test_stages_are_measured_beside_their_models(tmp_path):
    report, row = tmp_path / "found.json", "share of stages"
    command = [sys.executable, TESTS / "bench_gpu", "--device", "cpu", "--json", report, "--rows", row]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no figures for GPUs" in done.stdout
    lines = json.loads(report.read_text())["rows"][row]["lines"]
    found = [(line["stage"], line["precision"], line["feeders"]) for line in lines]
    assert found == [*product(("match", "encode"), ("fp32", "bf16"), (1, 4, 8, "auto"))]
    assert all(line["hours per hour"] > 0 and line["ms of the rank per second"] > 0 for line in lines)
    # On a CPU the rank decodes by default.
    assert all((line["ms of feeders per second"] > 0) == (line["feeders"] != "auto") for line in lines)
