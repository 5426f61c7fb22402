"""A stage that adds a field: when the field is made anew, and which fields are refused before any work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.errors import raises
from support.packages import install
from support.shar import Project, voice

from sharmill.engine.listener import Listener
from sharmill.errors import ConfigError
from sharmill.grow.merge import merge_datasets
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar
from sharmill.shar.cut_lines import write_values
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.layout import Field


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


def test_a_field_that_cannot_be_is_refused_before_any_work(configure, tmp_path):
    with raises(ConfigError, "bad_config_value", "loudness/a-b", "'loudness_a-b'"):
        run_dataset(configure(name="a-b"), Listener())
    assert not (tmp_path / "run").exists()


def test_a_field_of_two_stages_is_refused_before_any_work(configure, tmp_path, monkeypatch):
    config = configure()
    sections = config.sections["loudness"]
    config = replace(config, sections=config.sections | {"loudness": [*sections, replace(sections[0], name="other")]})
    field = Field(name="same", file="same/values.{:06d}.jsonl.gz", kind="value", attribute="same")
    monkeypatch.setattr("loudness_stage.LoudnessStage.fields", lambda stage: [field])
    with raises(ConfigError, "bad_config_value", "loudness/other", "loudness/plain", "same"):
        run_dataset(config, Listener())
    assert not (tmp_path / "run").exists()


def test_one_section_takes_the_place_of_a_list_of_them(configure):
    assert run_dataset(configure(), Listener()).ok
    config = configure()
    single = replace(config, sections=config.sections | {"loudness": replace(config.sections["loudness"][0], name="")})
    assert run_dataset(single, Listener()).ok
    assert {"loudness", "loudness_plain"} <= vars(next(iter(open_shar(config.dataset_dir))))["custom"].keys()


def test_a_stage_without_fields_is_refused(configure, monkeypatch):
    monkeypatch.setattr("loudness_stage.LoudnessStage.fields", lambda stage: [])
    with raises(ConfigError, "bad_plugin", "loudness/plain"):
        run_dataset(configure(), Listener())


@pytest.mark.parametrize("attribute", ["target_audio", "split"])
def test_a_field_that_hides_what_cuts_have_is_refused_before_any_work(configure, tmp_path, monkeypatch, attribute):
    field = Field(name="own", file="own/values.{:06d}.jsonl.gz", kind="value", attribute=attribute)
    monkeypatch.setattr("loudness_stage.LoudnessStage.fields", lambda stage: [field])
    with raises(ConfigError, "bad_config_value", "loudness/plain", attribute):
        run_dataset(configure(), Listener())
    assert not (tmp_path / "run").exists()


def test_what_an_interrupted_restart_leaves_of_fields_is_removed_by_the_next(configure, monkeypatch):
    config = configure()
    assert run_dataset(config, Listener()).ok
    with monkeypatch.context() as patch:
        patch.setattr(ShardedDataset, "_remove_files", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_dataset(config, Listener(), stages=["write"], restart=True)
    assert not Path(config.dataset_dir, "dataset.json").exists()
    assert Path(config.dataset_dir, "loudness_plain").exists()
    assert run_dataset(config, Listener()).num_errors == 0


def test_a_dataset_that_has_other_fields_is_not_appended_to(configure, tmp_path):
    config = configure()
    assert run_dataset(config, Listener()).ok
    new = {"run_dir": str(tmp_path / "run2"), "dataset_dir": str(tmp_path / "new"), "append_to": config.dataset_dir}
    with raises(ConfigError, "unlike_datasets", "['loudness_other']", "['loudness_plain']"):
        run_dataset(replace(configure(name="other"), **new), Listener())
    assert not (tmp_path / "run2").exists()


def test_columns_of_other_settings_are_not_put_together(configure, tmp_path):
    config = configure()
    other = replace(configure(level=6.0), run_dir=str(tmp_path / "run2"), dataset_dir=str(tmp_path / "louder"))
    assert all(run_dataset(one, Listener()).ok for one in (config, other))
    with raises(ConfigError, "unlike_datasets", "settings of the field 'loudness_plain'", "6.0"):
        merge_datasets([config.dataset_dir, other.dataset_dir], tmp_path / "merged")


def test_another_version_of_the_package_begins_a_field_anew(configure, tmp_path, monkeypatch):
    config = configure()
    assert run_dataset(config, Listener()).ok
    install(monkeypatch, tmp_path / "site", "loudness", version="1.1")
    with raises(ConfigError, "changed_plan", "loudness/plain", "loudness-stage 1.1"):
        run_dataset(config, Listener())


def test_a_field_without_a_value_for_each_cut_fails(configure, monkeypatch):
    monkeypatch.setattr("loudness_stage.write_values", lambda path, name, values: write_values(path, name, values[:1]))
    (_, outcome) = run_dataset(configure(), Listener()).stages[-1]
    assert ["what was written of loudness_plain" in error.message for error in outcome.failures.values()] == [True]


def test_what_is_begun_anew_with_a_field_is_what_reads_it(configure):
    assert run_dataset(configure(), Listener()).ok
    with raises(ConfigError, "changed_plan", "sharmill run CONFIG loudness validate --restart"):
        run_dataset(configure(level=1.0), Listener())
