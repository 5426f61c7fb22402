"""The pilot of a small input, and the comparison of its predictions with a real run."""

import html
import json
from pathlib import Path

import msgspec
import pytest
from support.project import Project, run, speaker_tag, stage_of, voice
from support.web import serving

from sharmill.config import load_config, to_yaml
from sharmill.pilot.calibration import Calibration
from sharmill.pilot.sample import run_pilot


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


def outcome(config) -> Calibration:
    return msgspec.json.decode((Path(config.run_dir) / "calibration.json").read_bytes(), type=Calibration)


def test_predictions_come_true(project, configured, call):
    config, path = configured
    out = call("calibrate", path)[1]
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
    assert run(stage_of(config, "prepare")).ok
    totals = run(stage_of(config, "match")).totals
    foretold = {round(one.min_similarity, 2): one.context_share for one in found.advice.thresholds}
    assert foretold[0.8] == pytest.approx(totals.num_out / 20)
    assert found.durations["1"] == pytest.approx(1.75)
    assert "silent_audio" in out
    assert "calibration.json" in out
    assert [rate.name for rate in found.rates] == [
        "prepare", "match", "write", "encode/builtin", "encode.shards/builtin", "validate",
    ]  # fmt: skip
    assert all(rate.seconds_per_cost > 0 and rate.bytes_per_cost > 0 for rate in found.rates)
    assert [*Path(config.run_dir).glob("pilot-*")] == []


@pytest.mark.slow
def test_a_run_that_loses_many_records_recommends_calibrate(configured, tmp_path, call):
    _, path = configured
    elsewhere = ["max_reject_fraction=1", f"run_dir={tmp_path}/run", f"dataset_dir={tmp_path}/data"]
    said = [
        " ".join(
            call("run", path, "prepare", "match", f"match.min_similarity={least}", *elsewhere, "--restart")[1].split()
        )
        for least in (-1.0, 0.99)
    ]
    assert ["sharmill calibrate to choose match.min_similarity" in one for one in said] == [False, True]


def test_the_same_seed_finds_the_same(configured, call):
    config, path = configured
    seen = []
    for _ in range(2):
        call("calibrate", path, "--records", "8", "--seed", "3", "--no-rates")
        seen.append(json.loads(msgspec.json.encode(outcome(config))))
    assert seen[0] == seen[1]
    assert seen[0]["num_drawn"] < 20


def test_near_copies_are_counted_and_excluded_by_max_similarity(tmp_path, call):
    """A recording, a copy with an offset, a lossy copy, and two other recordings of the speaker."""
    project = Project(tmp_path)
    samples = voice(2.0, seed=1)
    for name, one in (("a.wav", samples), ("noisy.wav", samples + 1e-4), ("lossy.mp3", samples)):
        project.add(name, one, text="good day")
    project.add("other.wav", voice(2.0, seed=2))
    project.add("again.wav", voice(1.5, pitch=150, seed=3), text="good day")
    config = project.configure(match={"min_duration": 1.0, "min_similarity": 0.0})
    path = tmp_path / "config.yaml"
    path.write_bytes(to_yaml(config))
    out = call("calibrate", path, "--no-rates")[1]
    found = outcome(config)
    assert found.near_copies == 3
    assert "3 utterances would get a copy of themselves as context" in " ".join(out.split())
    assert f"match.max_similarity={found.max_similarity:g}" in out
    assert "set match.min_similarity" not in out
    assert "recommended" not in out
    assert "copy" not in call("calibrate", path, "--no-rates", f"match.max_similarity={found.max_similarity}")[1]
    assert outcome(config).near_copies == 0


def test_one_name_for_many_people_lowers_no_threshold(tmp_path, call):
    """Ten voices with two recordings each, all under the same name."""
    project = Project(tmp_path)
    for number in range(20):
        samples = voice(1.5, pitch=120 + 40 * (number // 2), seed=number)
        project.add(f"utt{number}.wav", samples, speaker="host")
    config = project.configure(match={"min_duration": 1.0, "min_similarity": 0.999})
    path = tmp_path / "config.yaml"
    path.write_bytes(to_yaml(config))
    said = " ".join(call("calibrate", path, "--no-rates")[1].split())
    assert "most of the records are in one speaker group: check that its name stands for one person only" in said
    assert "set match.min_similarity=" not in said
    assert outcome(config).advice.recommended is None
    said = " ".join(call("run", path, "prepare")[1].split())
    doubt = "100% of 20 utterances from 20 recordings have the speaker 'host': check that this is one person"
    assert f"prepare: {doubt}" in said
    call("report", config.run_dir)
    assert doubt in html.unescape((Path(config.run_dir) / "report.html").read_text())


def test_a_dataset_without_contexts_has_rejects_and_no_threshold(configured, call):
    config, path = configured
    out = call("calibrate", path, "match=null", "--no-rates")[1]
    assert outcome(config).advice is None
    assert "missing_audio" in out
    assert "min_similarity" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["match"], "takes one configuration"),
        (["other.yaml"], "takes one configuration"),
        (["--records", "10001"], "2<=x<=10000"),
        (["sources.0.manifest={folder}/empty.json"], "no records"),
    ],
)
def test_wrong_use_is_refused_in_one_line(configured, tmp_path, arguments, words, call):
    (tmp_path / "empty.json").write_text("")
    given = [argument.format(folder=tmp_path) for argument in arguments]
    status, _, err = call("calibrate", configured[1], *given)
    assert (status, words in err) == (2, True)


def test_a_pilot_downloads_once_and_stores_no_secret(project, tmp_path, monkeypatch):
    addition = Project(tmp_path)
    addition.records = [record for record in project.records if record["speaker"] == speaker_tag("s0")]
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(project.root) as server:
        for name, value in (("NAME", "z8"), ("ENCODER", "resemblyzer"), ("ROOT", server.url)):
            monkeypatch.setenv(name, value)
        config = addition.configure(
            append_to=str(tmp_path / "other"), match={"min_duration": 0.1, "contexts_from_dataset": True},
            metrics={"wandb_project": "speech"}, validate={"against_sources": True}, encode={"codecs": []},
        )  # fmt: skip
        text = to_yaml(config).decode().replace("name: small", "name: ${oc.env:NAME}")
        text = text.replace("encoder: resemblyzer", "encoder: ${oc.env:ENCODER}")
        (tmp_path / "config.yaml").write_text(
            text.replace(f"audio_root: {addition.root}", "audio_root: ${oc.env:ROOT}")
        )
        path, found = run_pilot(load_config(tmp_path / "config.yaml"))
        assert set(server.requests.values()) == {1}
    assert [rate.name for rate in found.rates] == ["prepare", "match", "write", "validate"]
    assert (found.name, found.encoder) == ("${oc.env:NAME}", "${oc.env:ENCODER}")
    assert server.url not in path.read_text()
