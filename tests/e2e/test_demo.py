"""The demo as `make demo` runs it, and what status and plan say of it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from support.paths import REPOSITORY
from support.pipelines import read_with_lhotse, run_sharmill

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "demo"
    outcome = subprocess.run(
        [sys.executable, "-m", "sharmill", "demo", folder], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert outcome.returncode == 0, outcome.stderr
    return folder, outcome.stdout


def test_says_that_its_codec_is_a_small_one(demo):
    assert "a small one for trying out" in " ".join(demo[1].split())
    described = json.loads((demo[0] / "dataset/dataset.json").read_text())
    assert [(codec["name"], codec["trained"]) for codec in described["codecs"]] == [("builtin", True)]


def test_its_last_step_is_a_page_with_audio_from_the_codes(demo):
    folder, output = demo
    page = (folder / "run/report.html").read_text()
    assert f"report: {folder}/run/report.html, " in output.replace("\n", "")
    assert page.count("Play target of ") == page.count("Play target decoded from builtin of ") >= 10
    assert "Map of the voices" in page
    assert len(page) < 15_000_000


def test_makes_a_dataset_of_all_good_records(demo):
    folder, output = demo
    described = json.loads((folder / "dataset/dataset.json").read_text())
    assert described["num_cuts"] == 240
    assert len((folder / "run/rejects.jsonl").read_text().splitlines()) == 14
    assert "validation: no findings" in output


def test_the_program_that_it_ends_with_reads_the_dataset(demo):
    lines = demo[1].split("in Python:\n")[1].split("\n- use your own speech")[0].splitlines()
    program = "\n".join(line.removeprefix("    ") for line in lines)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout.startswith("cut-"), done.stderr


def test_plain_lhotse_loads_everything(demo):
    count = 0
    for cut in read_with_lhotse(demo[0] / "dataset", "builtin"):
        count += 1
        assert np.abs(cut.load_target_audio()).max() > 0.01
        assert np.abs(cut.load_context_audio()).max() > 0.01
        assert len(np.unique(cut.target_codes.load())) > 10
        assert len(np.unique(cut.context_codes.load())) > 10
    assert count == 240


def test_status_shows_every_stage_as_done(demo):
    output = run_sharmill("status", demo[0] / "run").stdout
    for stage in ("prepare", "match", "write", "survey", "encode/builtin", "assemble/builtin", "validate"):
        (row,) = [line for line in output.splitlines() if line.startswith(f"{stage}  ")]
        assert " done " in row


def test_plan_of_a_finished_run_has_nothing_left(demo):
    outcome = run_sharmill("plan", demo[0] / "demo.yaml")
    assert outcome.returncode == 0, outcome.stderr
    row, *_ = [line for line in outcome.stdout.splitlines() if line.startswith("write ")]
    assert row.split()[1:4] == ["5/5", "0.000", "h"]
