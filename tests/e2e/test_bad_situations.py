"""What goes wrong around a run: one clear line, the right exit status, nothing half written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
from support.pipelines import digest, run_sharmill
from support.timing import within
from support.toy_stage import wait_until

pytestmark = pytest.mark.e2e


def error_lines(outcome):
    assert "Traceback" not in outcome.stderr
    return [line for line in outcome.stderr.splitlines() if line.startswith("Error")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sources": [{"manifest": "nowhere.json", "audio_root": "/tmp"}]}, "nowhere.json"),
        ({"sources": [{"manifest": "m.json", "audio_root": "/no/such/root"}]}, "/no/such/root"),
        ({"encode": {"codecs": [{"name": "c", "model": "nemo:pyproject.toml.nemo"}]}}, "pyproject.toml.nemo"),
        ({"encode": {"codecs": [{"name": "c", "model": "nemo:pyproject.toml"}]}}, "pyproject.toml"),
        ({"match": {"encoder": "resemblizer"}}, "resemblyzer"),
        ({"speaker_key": "librispech"}, "librispeech"),
        ({"match": {"min_similarty": 0.5}}, "min_similarity"),
        ({"prepare": {"filters": {"cer": "small"}}}, "prepare.filters.cer"),
    ],
)
def test_wrong_configuration_ends_the_run_before_any_work(changes, expected, make_config, tmp_path):
    outcome = run_sharmill("run", make_config(tmp_path, **changes))
    assert outcome.returncode == 2
    (line,) = error_lines(outcome)
    assert expected in line
    assert not (tmp_path / "dataset").exists()


def test_an_output_folder_with_another_dataset_is_left_alone(make_config, tmp_path):
    other = tmp_path / "dataset"
    (other / "cuts").mkdir(parents=True)
    (other / "cuts/cuts.000000.jsonl.gz").write_bytes(b"somebody's")
    before = digest(other)
    for options in ([], ["--restart"]):
        outcome = run_sharmill("run", make_config(tmp_path), *options)
        assert outcome.returncode == 2
        (line,) = error_lines(outcome)
        assert str(other) in line
        assert digest(other) == before


@pytest.mark.slow
def test_another_configuration_is_refused_until_restart(make_config, tmp_path):
    config = make_config(tmp_path, encode={"codecs": []})
    assert run_sharmill("run", config, "prepare", "match", "write").returncode == 0
    changed = run_sharmill("run", config, "prepare", "match", "write", "write.shard_size=5")
    assert changed.returncode == 2
    (line,) = error_lines(changed)
    assert "write.shard_size" in line
    assert line.endswith("sharmill run CONFIG write --restart")
    both = run_sharmill("run", config, "prepare", "match", "write", "write.shard_size=5", "match.min_duration=0.5")
    assert error_lines(both)[0].endswith("sharmill run CONFIG match write --restart")
    restarted = run_sharmill("run", config, "write", "write.shard_size=5", "--restart")
    assert restarted.returncode == 0, restarted.stderr
    shards = (tmp_path / "dataset/shards.jsonl").read_text().splitlines()
    assert [json.loads(shard)["count"] for shard in shards] == [5] * 8


@pytest.mark.slow
@pytest.mark.parametrize("which", ["run_dir", "dataset_dir"])
def test_a_read_only_output_folder(which, make_config, small_disk, tmp_path):
    folder = small_disk("10m")
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    outcome = run_sharmill(
        "run", make_config(tmp_path, **{which: str(folder / "out")}, encode={"codecs": []}), "prepare", "match", "write"
    )
    assert outcome.returncode == 2
    (line,) = error_lines(outcome)
    assert str(folder) in line


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_within_five_seconds_and_a_relaunch_goes_on(workers, make_config, start_sharmill, tmp_path):
    config = make_config(tmp_path, executor={"workers": workers})
    process = start_sharmill("run", config, "prepare", "match")
    wait_until(lambda: any((tmp_path / "run/match/ranks").glob("*/ledger/*")))
    pressed = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - pressed < within(5)
    if process.returncode != 0:
        assert process.returncode == 1
        assert "Traceback" not in errors
    kept = {path: path.read_bytes() for path in (tmp_path / "run/match/ranks").glob("*/ledger/*")}
    assert kept
    assert run_sharmill("run", config, "prepare", "match").returncode == 0
    assert {path: path.read_bytes() for path in kept} == kept
