"""A stage of an installed package that adds a column: nothing of sharmill names it, its keys or its column."""

import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import Mock

import pytest
from lhotse import CutSet
from support.project import Project, install, raises, voice

from sharmill.audio.sound import measure_sound
from sharmill.cli.main import main
from sharmill.engine.executor import Listener
from sharmill.engine.order import choose_stages, make_stages
from sharmill.errors import ConfigError
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import Field
from sharmill.shar.json_lines import write_values
from sharmill.validate.findings import take_back_commits


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """Has the package of the stage installed."""
    install(monkeypatch, tmp_path / "site", "loudness")


def configure(folder):
    """Configure a dataset of six recordings, with two stages of the package."""
    project = Project(folder)
    for number in range(6):
        samples = voice(0.4, seed=number) / (number + 1)
        project.add(f"{folder.name}{number}.flac", samples, speaker=f"{folder.name}{number // 2}")
    return project.configure(
        match=None, write={"shard_size": 2}, encode={"codecs": []}, executor={"workers": 1},
        loudness=[{"name": "plain"}, {"name": "quiet", "level": -40.0}],
    )  # fmt: skip


def require_columns(dataset):
    """Assert that every cut has its values, by sharmill's reader and by lhotse's, and return the number of cuts."""
    cuts = list(open_shar(dataset, ["cuts", "target_audio", "loudness_plain", "loudness_quiet"]))
    loudness = [measure_sound(cut.load_audio()[0], 16000).loudness for cut in cuts]
    assert [cut.loudness_plain for cut in cuts] == pytest.approx(loudness)
    assert [cut.loudness_quiet - 40.0 for cut in cuts] == pytest.approx(loudness)
    fields = {name: sorted(map(str, Path(dataset, name).glob("*.gz"))) for name in ("cuts", "loudness_quiet")}
    assert [cut.loudness_quiet for cut in CutSet.from_shar(fields=fields)] == [cut.loudness_quiet for cut in cuts]
    return len(cuts)


def test_a_stage_is_killed_resumed_listed_and_shown(tmp_path, monkeypatch, capsys):
    config = configure(tmp_path / "one")
    first = Path(config.dataset_dir, "loudness_plain/values.000000.jsonl.gz")
    with monkeypatch.context() as patch:
        kill = lambda *sound: os.kill(os.getpid(), 9) if first.exists() else measure_sound(*sound)  # noqa: E731
        patch.setattr("loudness_stage.measure_sound", kill)
        process = get_context("fork").Process(target=run_dataset, args=(config, Listener()))
        process.start()
        process.join()
    before = first.stat().st_mtime_ns
    assert (run_dataset(config, Listener()).num_errors, first.stat().st_mtime_ns) == (0, before)
    assert require_columns(config.dataset_dir) == 6
    for command, folder in (("status", config.run_dir), ("inspect", config.dataset_dir), ("report", config.run_dir)):
        with pytest.raises(SystemExit, match="0"):
            main([command, folder])
    printed, page = capsys.readouterr().out, Path(config.run_dir, "report.html").read_text()
    assert all(
        name in printed and name in page
        for name in ("loudness_plain", "loudness_quiet", "loudness/plain", "loudness/quiet")
    )


@pytest.mark.parametrize(("kept", "value"), [(1, 0.0), (2, None), (2, 999.0)])
def test_a_damaged_or_missing_value_is_found_and_made_again(kept, value, tmp_path):
    config = run_dataset(configure(tmp_path / "one"), Listener()).config
    path = Path(config.dataset_dir, "loudness_quiet/values.000001.jsonl.gz")
    before, cuts = path.read_bytes(), list(open_shar(config.dataset_dir))[2:4]
    write_values(path, "loudness_quiet", [(cut.id, value) for cut in cuts[:kept]])
    report = run_dataset(config, Listener(), stages=["validate"]).report
    assert {(unit.stage, unit.shard) for unit in report.units_to_repeat} - {("index", None)} == {("loudness/quiet", 1)}
    take_back_commits(config, report, choose_stages(config))
    assert run_dataset(config, Listener()).num_errors == 0
    assert path.read_bytes() == before


def test_its_ranks_have_resources_of_their_own_in_a_cluster_profile(tmp_path):
    profile, stages = ClusterProfile(stages={"loudness": {"cores": 3}}), make_stages(configure(tmp_path / "one"))
    assert [profile.for_stage(stage.kind, stage.resource).cores for stage in stages] == [1, 1, 3, 3, 1]


@pytest.mark.slow
def test_without_the_package_the_dataset_is_read_checked_and_grown(tmp_path):
    one, two = (run_dataset(configure(tmp_path / name), Listener()).config for name in ("one", "two"))
    merged, train, valid = (str(tmp_path / name) for name in ("merged", "parts/train", "parts/valid"))
    for arguments in (
        ("merge", one.dataset_dir, two.dataset_dir, merged),
        ("split", merged, str(tmp_path / "parts"), "--by-speaker", "--valid", "30%"),
        ("append", one.dataset_dir, two.dataset_dir),
        *(("validate", dataset) for dataset in (one.dataset_dir, merged, train, valid)),
        ("inspect", merged),
        ("status", one.run_dir),
    ):
        # A process of its own does not see the package.
        subprocess.run([sys.executable, "-P", "-m", "sharmill", *arguments], check=True)
    assert require_columns(one.dataset_dir) == require_columns(merged) == 12
    assert require_columns(train) + require_columns(valid) == 12


@pytest.fixture
def small(tmp_path):
    """A dataset of two cuts, with one stage of the package."""
    keys = {"match": None, "encode": {"codecs": []}, "executor": {"workers": 1}, "loudness": [{"name": "plain"}]}
    return Project(tmp_path).add_voices([0.4, 0.4]).configure(**keys)


def test_a_dataset_that_is_written_anew_gets_its_fields_anew(small):
    assert run_dataset(small, Listener()).ok
    before = [cut.loudness_plain for cut in open_shar(small.dataset_dir)]
    assert run_dataset(small, Listener(), stages=["write"], restart=True).ok
    assert not Path(small.dataset_dir, "loudness_plain").exists()
    assert run_dataset(small, Listener()).num_errors == 0
    assert [cut.loudness_plain for cut in open_shar(small.dataset_dir)] == before


def hiding(attribute):
    return [Field(name="own", file="own/values.{:06d}.jsonl.gz", kind="value", attribute=attribute)]


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [(hiding("target_audio"), "bad_config_value", "target_audio"), (hiding("split"), "bad_config_value", "split"),
     ([], "bad_plugin", "")],
)  # fmt: skip
def test_fields_that_hide_keys_of_cuts_are_refused_before_work(small, tmp_path, monkeypatch, fields, code, word):
    monkeypatch.setattr("loudness_stage.LoudnessStage.fields", lambda stage, run: fields)
    with raises(ConfigError, code, "loudness/plain", word):
        run_dataset(small, Listener())
    assert not (tmp_path / "run").exists()


def test_fields_of_an_interrupted_restart_are_removed_by_the_next(small, monkeypatch):
    assert run_dataset(small, Listener()).ok
    with monkeypatch.context() as patch:
        patch.setattr(ShardedDataset, "_remove_files", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_dataset(small, Listener(), stages=["write"], restart=True)
    assert not Path(small.dataset_dir, "dataset.json").exists()
    assert Path(small.dataset_dir, "loudness_plain").exists()
    assert run_dataset(small, Listener()).num_errors == 0


def test_a_field_without_a_value_for_each_cut_fails(small, monkeypatch):
    monkeypatch.setattr("loudness_stage.write_values", lambda path, name, values: write_values(path, name, values[:1]))
    (_, outcome) = run_dataset(small, Listener()).stages[-1]
    assert ["the items of the field loudness_plain" in error.message for error in outcome.failures.values()] == [True]
