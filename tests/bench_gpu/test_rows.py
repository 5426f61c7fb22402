"""The GPU benchmarks run on the CPU with small models."""

import json
import subprocess
import sys
from itertools import product

import pytest
from support.project import TESTS


def measure(tmp_path, *rows):
    """Return the lines of the rows whose names start so, by name."""
    report = tmp_path / "found.json"
    command = [sys.executable, TESTS / "bench_gpu", "--device", "cpu", "--json", report]
    command += ["--seconds", "2000", "--rows", *rows]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no figures for GPUs" in done.stdout
    return {name: row["lines"] for name, row in json.loads(report.read_text())["rows"].items()}


@pytest.mark.slow
def test_stages_are_measured_beside_their_models(tmp_path):
    (lines,) = measure(tmp_path, "share of stages").values()
    found = [(line["stage"], line["precision"], line["feeders"]) for line in lines]
    assert found == [*product(("match", "encode"), ("fp32", "bf16"), (1, 4, 8, "auto"))]
    assert all(line["hours per hour"] > 0 and line["ms of the rank per second"] > 0 for line in lines)
    # On a CPU, the rank itself decodes by default.
    assert all((line["ms of feeders per second"] > 0) == (line["feeders"] != "auto") for line in lines)


@pytest.mark.slow
def test_ours_is_measured_beside_nemos_encode(tmp_path):
    """Both run in each precision of a CPU, with the same codes in fp32."""
    (lines,) = measure(tmp_path, "encode").values()
    assert [(line["precision"], "left out" in line) for line in lines] == [
        ("fp32", False), ("tf32", True), ("bf16", False)
    ]  # fmt: skip
    assert lines[0]["differ"] == 0 < lines[0]["codes"]
    assert all(speed > 0 for line in lines[::2] for speed in line["hours per hour"].values())


@pytest.mark.slow
def test_batches_of_a_codec_and_a_salm_are_tuned(tmp_path):
    pytest.importorskip("peft")
    rows = measure(tmp_path, "tune-batch")
    assert {name: line["batch sizes"] for name, (line,) in rows.items()} == {
        "tune-batch of a codec": [2, 2], "tune-batch of a SALM": [2, 2]
    }  # fmt: skip
