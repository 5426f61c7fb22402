"""The pilot of a small input: what it foretells is what a run then does."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from support.shar import Project, run, voice

from sharmill.cli.main import main
from sharmill.config import to_yaml
from sharmill.match.stage import MatchStage
from sharmill.pilot.calibrate import Calibration
from sharmill.prepare.stage import PrepareStage


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Four speakers with four utterances each, one utterance alone, and three records that prepare rejects."""
    project = Project(tmp_path_factory.mktemp("pilot"))
    for number in range(16):
        samples = voice(1.0 + 0.05 * number, pitch=120 + 45 * (number % 4) + number, seed=number)
        project.add(f"utt{number}.wav", samples, speaker=f"s{number % 4}")
    project.add("alone.flac", voice(1.5), speaker="alone")
    project.add("missing.wav", duration=1.0)
    project.add("low.wav", voice(0.5, rate=8000), 8000, duration=7.0)
    project.add("quiet.wav", voice(1.0) * 0, speaker="s0")
    return project


@pytest.fixture(scope="module")
def configured(project):
    config = project.configure(match={"min_duration": 1.1, "min_similarity": 0.8}, prepare={"unit_records": 3})
    path = project.folder / "config.yaml"
    path.write_bytes(to_yaml(config))
    return config, path


def calibrate(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *map(str, arguments)])
    output = capsys.readouterr()
    assert ended.value.code == 0, output.err
    return output.out


def outcome(config) -> Calibration:
    return msgspec.json.decode((Path(config.run_dir) / "calibration.json").read_bytes(), type=Calibration)


def test_what_is_foretold_comes_true(project, configured, capsys):
    config, path = configured
    printed = calibrate(capsys, path)
    found = outcome(config)
    assert (found.num_records, found.num_drawn, found.num_groups) == (20, 20, 6)
    reasons = {(reject.stage, reject.reason): reject.count for reject in found.rejects}
    assert reasons == {
        ("prepare", "missing_audio"): 1,
        ("prepare", "duration_mismatch"): 1,
        ("match", "silent_audio"): 1,
        ("match", "single_utterance_speaker"): 1,
    }
    assert {(one.format, one.sampling_rate, one.count) for one in found.formats} == {
        ("wav", 16000, 17), ("flac", 16000, 1),
    }  # fmt: skip
    assert run(PrepareStage(config)).ok
    totals = run(MatchStage(config)).totals
    foretold = {round(one.min_similarity, 2): one.context_share for one in found.advice.thresholds}
    assert foretold[0.8] == pytest.approx(totals.num_out / 20)
    assert found.durations["1"] == pytest.approx(1.75)
    assert "silent_audio" in printed
    assert "calibration.json" in printed
    assert [rate.name for rate in found.rates] == [
        "prepare", "match", "write", "survey", "encode/builtin", "assemble/builtin", "validate",
    ]  # fmt: skip
    assert all(rate.seconds_per_cost > 0 and rate.bytes_per_cost > 0 for rate in found.rates)
    assert [*Path(config.run_dir).glob("pilot-*")] == []


def test_the_same_seed_finds_the_same(configured, capsys):
    config, path = configured
    seen = []
    for _ in range(2):
        calibrate(capsys, path, "--records", "8", "--seed", "3", "--no-rates")
        seen.append(json.loads(msgspec.json.encode(outcome(config))))
    assert seen[0] == seen[1]
    assert seen[0]["num_drawn"] < 20


def test_a_dataset_without_contexts_has_rejects_and_no_threshold(configured, capsys):
    config, path = configured
    printed = calibrate(capsys, path, "match=null", "--no-rates")
    assert outcome(config).advice is None
    assert "missing_audio" in printed
    assert "min_similarity" not in printed


@pytest.mark.parametrize("arguments", [("match",), ("other.yaml",)])
def test_it_takes_one_configuration(configured, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", str(configured[1]), *arguments])
    assert ended.value.code == 2
    assert "takes one configuration" in capsys.readouterr().err


def test_more_records_than_fit_into_memory_are_refused(configured, capsys):
    with pytest.raises(SystemExit) as ended, mock.patch("sharmill.pilot.calibrate.read_pilot") as read:
        main(["calibrate", str(configured[1]), "--records", "10001"])
    assert ended.value.code == 2
    assert "2<=x<=10000" in capsys.readouterr().err
    read.assert_not_called()


def test_an_input_without_records_is_refused(configured, tmp_path, capsys):
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(SystemExit) as ended, mock.patch("sharmill.pilot.calibrate.MatchStage") as stage:
        main(["calibrate", str(configured[1]), f"sources.0.manifest={tmp_path / 'empty.json'}"])
    assert ended.value.code == 2
    assert "no records" in capsys.readouterr().err
    stage.assert_not_called()
