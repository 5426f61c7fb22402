"""A stage that adds a field: when the field is made anew, and which fields are refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.errors import raises
from support.packages import install
from support.shar import Project, voice

from sharmill.engine.listener import Listener
from sharmill.errors import ConfigError
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Returns a function: keys of the stage ``loudness`` -> configuration of a dataset of two cuts."""
    install(monkeypatch, tmp_path / "site", "loudness")
    project = Project(tmp_path)
    for number in range(2):
        project.add(f"{number}.flac", voice(0.4, seed=number))
    keys = {"match": None, "encode": {"codecs": []}, "executor": {"workers": 1}}
    return lambda **loudness: project.configure(**keys, loudness=[{"name": "plain"} | loudness])


def test_other_settings_are_another_field(configure):
    assert run_dataset(configure(), Listener()).ok
    with raises(ConfigError, "changed_plan", "loudness/plain", "settings.level is 1.0, was 0.0"):
        run_dataset(configure(level=1.0), Listener())


def test_a_dataset_that_is_written_anew_gets_its_fields_anew(configure):
    config = configure()
    assert run_dataset(config, Listener()).ok
    before = [cut.loudness_plain for cut in open_shar(config.dataset_dir)]
    assert run_dataset(config, Listener(), stages=["write"], restart=True).ok
    assert not Path(config.dataset_dir, "loudness_plain").exists()
    assert run_dataset(config, Listener()).num_errors == 0
    assert [cut.loudness_plain for cut in open_shar(config.dataset_dir)] == before
