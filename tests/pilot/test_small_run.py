"""The dataset of a pilot: of its own, whatever the configuration adds to, and nothing of it is stored or logged."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import msgspec
import pytest
from support.shar import Project, voice
from support.web import serving

from sharmill.config import load_config, to_yaml
from sharmill.errors import FatalError
from sharmill.pilot.calibrate import Calibration, run_pilot

SECRET = "hf-Tr0ub4dor"
RUN_DATASET = "sharmill.pilot.small_run.run_dataset"


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    for number in range(4):
        project.add(f"{number}.wav", voice(1.0, pitch=150 + 20 * (number % 2), seed=number), speaker=f"s{number % 2}")
    return project


def load(project, replaced=("", ""), **changes):
    """The configuration as it is read from a file."""
    match = {"min_duration": 0.1, "min_similarity": -1.0} | changes.pop("match", {})
    path = project.folder / "config.yaml"
    text = to_yaml(project.configure(match=match, encode={"codecs": []}, **changes)).decode()
    path.write_text(text.replace(*replaced))
    return load_config(path)


def seen_by_run(config):
    """The configuration of the small dataset, as the run of its stages gets it."""
    stopped = FatalError("stop", code="units_failed")
    with mock.patch(RUN_DATASET, side_effect=stopped) as run, pytest.raises(FatalError):
        run_pilot(config)
    return run.call_args.args[0]


def test_a_pilot_of_an_addition_is_no_addition(project):
    config = load(project, append_to=str(project.folder / "other"), match={"contexts_from_dataset": True})
    _, found = run_pilot(config)
    assert [rate.name for rate in found.rates] == ["prepare", "match", "write", "validate"]


def test_an_error_of_a_later_stage_leaves_the_advice(project):
    config = load(project)
    seen_by_run(config)
    stored = (Path(config.run_dir) / "calibration.json").read_bytes()
    found = msgspec.json.decode(stored, type=Calibration)
    assert found.advice is not None
    assert found.rates == []


def test_curves_and_the_account_of_the_sources_are_left_out(project):
    config = load(project, metrics={"wandb_project": "speech"}, validate={"against_sources": True})
    small = seen_by_run(config)
    assert small.metrics.wandb_project is None
    assert not small.sections["validate"].against_sources


def test_the_small_dataset_stores_no_value_of_the_environment(project, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    config = load(project, ("dataset: null", "dataset: ${oc.env:SECRET}"))
    small = to_yaml(seen_by_run(config))
    assert SECRET.encode() not in small
    assert b"dataset: ${oc.env:SECRET}" in small


def test_what_was_fetched_is_not_fetched_again(project, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(project.root) as server:
        manifest = str(project.folder / "small.json")
        run_pilot(load(project, sources=[{"manifest": manifest, "audio_root": server.url}]))
        assert sorted(server.requests.values()) == [1, 1, 1, 1]
    assert len([path for path in (project.run_dir / "copies").rglob("*") if path.is_file()]) == 4


def test_the_outcome_of_a_pilot_has_no_value_of_the_environment(project, monkeypatch):
    project.add("absent.wav", duration=1.0)
    for name, value in (("NAME", "z8"), ("ENCODER", "resemblyzer"), ("ROOT", str(project.root))):
        monkeypatch.setenv(name, value)
    load(project)
    text = (project.folder / "config.yaml").read_text()
    for value, reference in (
        ("name: small", "name: ${oc.env:NAME}"), ("encoder: resemblyzer", "encoder: ${oc.env:ENCODER}"),
        (f"audio_root: {project.root}", "audio_root: ${oc.env:ROOT}"),
    ):  # fmt: skip
        text = text.replace(value, reference)
    (project.folder / "config.yaml").write_text(text)
    config = load_config(project.folder / "config.yaml")
    path, found = run_pilot(config, measure=False)
    assert (found.name, found.encoder) == ("${oc.env:NAME}", "${oc.env:ENCODER}")
    (reject,) = found.rejects
    assert "${oc.env:ROOT}/absent.wav" in reject.example
    assert str(project.root) not in path.read_text()
