"""A dataset is changed and removed by its own run only: it proves by reservations or by its content whose it is."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
from pathlib import Path
from unittest import mock

import pytest
from support.errors import raises
from support.shar import PitchEncoder, Project, ToyCodec, codec_stages, loading, run, snapshot, voice

from sharmill.engine.fence import make_fence
from sharmill.engine.listener import Listener
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.executors.local import LocalExecutor
from sharmill.executors.slurm.executor import RankTask
from sharmill.executors.slurm.profile import RankProfile
from sharmill.files.staging import STAGING_NAME
from sharmill.pipeline import run_dataset
from sharmill.shar.dataset import ShardedDataset
from sharmill.write.config import WriteConfig
from sharmill.write.stage import WriteStage


def make_project(folder, seed=0):
    project = Project(folder)
    folder.mkdir(exist_ok=True)
    for number in range(5):
        project.add(f"{number}.flac", voice(0.4, seed=10 * seed + number))
    return project


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a project with a finished dataset of three shards."""
    project = make_project(tmp_path_factory.mktemp("project") / "project")
    project.write(**SHARDS)
    return project.folder


SHARDS = {"write": {"shard_size": 2}, "match": {"min_duration": 0.0}}
OTHER_SHARDS = SHARDS | {"write": {"shard_size": 5}}


@pytest.fixture
def project(finished, tmp_path):
    """A copy of it: run directory and dataset directory were moved together."""
    shutil.copytree(finished, tmp_path / "project")
    return make_project(tmp_path / "project")


def at(config, folder):
    return dataclasses.replace(config, dataset_dir=str(folder))


class AfterStage(Listener):
    """Ends the run when the stage behind this one begins."""

    def __init__(self, name):
        self.name, self.has_begun = name, False

    def stage_started(self, stage, units, done):
        if self.has_begun:
            raise KeyboardInterrupt
        self.has_begun = stage.name == self.name


class TestMoved:
    def test_alone_it_goes_on_at_the_place_that_the_configuration_names(self, project, tmp_path):
        before = snapshot(project.dataset)
        project.dataset.rename(tmp_path / "elsewhere")
        config = at(project.configure(**SHARDS), tmp_path / "elsewhere")
        assert run(WriteStage(config)).ok
        project.dataset = tmp_path / "elsewhere"
        project.encode(config)
        assert {name: snapshot(project.dataset)[name] for name in before if "/" in name} == {
            name: data for name, data in before.items() if "/" in name
        }
        assert run(WriteStage(at(project.configure(**OTHER_SHARDS), project.dataset)), restart=True).ok
        assert len(list((project.dataset / "cuts").iterdir())) == 1

    @pytest.mark.parametrize("spelling", ["link", "dataset/../dataset"])
    def test_spelt_otherwise_it_is_the_same(self, project, spelling):
        (project.folder / "link").symlink_to("dataset")
        before = snapshot(project.dataset)
        assert run(WriteStage(at(project.configure(**SHARDS), project.folder / spelling))).ok
        assert snapshot(project.dataset) == before

    def test_codes_behind_a_link_are_not_removed(self, project, tmp_path):
        project.encode(project.configure(**SHARDS))
        (codes,) = project.dataset.glob("codes_*")
        codes.rename(tmp_path / "elsewhere")
        codes.symlink_to(tmp_path / "elsewhere")
        before = snapshot(tmp_path / "elsewhere")
        with raises(ConfigError, "foreign_output", f"{codes} is a link"):
            run(WriteStage(project.configure(**OTHER_SHARDS)), restart=True)
        assert snapshot(tmp_path / "elsewhere") == before

    def test_away_a_relaunch_says_so_and_a_restart_writes_it_anew(self, project, tmp_path):
        before = snapshot(project.dataset)
        project.dataset.rename(tmp_path / "elsewhere")
        with raises(ConfigError, "no_dataset", "move it back"):
            run(WriteStage(project.configure(**SHARDS)))
        assert run(WriteStage(project.configure(**SHARDS)), restart=True).ok
        assert snapshot(project.dataset) == snapshot(tmp_path / "elsewhere") == before


class TestOfAnother:
    @pytest.mark.parametrize("restart", [False, True])
    @pytest.mark.parametrize("begun", [False, True])
    def test_it_is_neither_overwritten_nor_removed(self, project, tmp_path, restart, begun):
        theirs = make_project(tmp_path / "theirs", seed=1)
        config = theirs.configure(**SHARDS)
        theirs.match_by_hand(config)
        if begun:
            assert run(WriteStage(config)).ok
            shutil.rmtree(theirs.dataset)
        shutil.copytree(project.dataset, theirs.dataset)
        before = snapshot(theirs.dataset)
        with raises(ConfigError, "foreign_output"):
            run(WriteStage(config), restart=restart)
        assert snapshot(theirs.dataset) == before

    @pytest.mark.parametrize("restart", [False, True])
    def test_an_identity_without_a_ledger_gives_no_right(self, project, restart):
        before = snapshot(project.dataset)
        for path in WriteStage(project.configure(**SHARDS)).dir.ledger.iterdir():
            path.unlink()
        for changes in (SHARDS, OTHER_SHARDS):
            with raises(ConfigError, "foreign_output"):
                run(WriteStage(project.configure(**changes)), restart=restart)
        assert snapshot(project.dataset) == before

    @pytest.mark.parametrize("restart", [False, True])
    def test_codes_of_the_same_name_are_neither_overwritten_nor_removed(self, project, tmp_path, restart):
        config = project.configure(**SHARDS)
        project.encode(config)
        before = snapshot(project.dataset)
        other = dataclasses.replace(config, run_dir=str(tmp_path / "other"))
        with loading(ToyCodec()), raises(ConfigError, "foreign_output"):
            run(codec_stages(other)[1], restart=restart)
        assert snapshot(project.dataset) == before


class TestRestart:
    def test_files_that_no_plan_names_stay(self, project):
        mine = [project.dataset / name for name in ("notes.txt", "cuts/notes.txt", "codes_mine/notes.txt")]
        for path in mine:
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine")
        assert run(WriteStage(project.configure(**OTHER_SHARDS)), restart=True).ok
        assert all(path.read_text() == "mine" for path in mine)
        assert len(list((project.dataset / "cuts").iterdir())) == 2

    def test_one_that_is_killed_is_done_by_a_later_run_too(self, project):
        """On SLURM all stages but the first are left to later jobs."""
        config = project.configure(**SHARDS | {"match": None})
        config = dataclasses.replace(config, run_dir=config.run_dir + "-b", dataset_dir=config.dataset_dir + "-b")

        def tokens():
            return {name: RunDir(Path(config.run_dir)).stage(name).read_token() for name in ("prepare", "write")}

        stages = ["prepare", "write"]
        assert run_dataset(config, Listener(), stages=stages).ok
        before = tokens()
        config = config.with_section(dataclasses.replace(config.section(WriteConfig), shard_size=5))
        with pytest.raises(KeyboardInterrupt):
            run_dataset(config, AfterStage("prepare"), stages=stages, restart=True)
        assert run_dataset(config, Listener(), stages=stages).ok
        after = tokens()
        assert not set(before.items()) & set(after.items())
        assert run_dataset(config, Listener(), stages=stages).ok
        assert tokens() == after

    def test_ranks_that_encode_the_old_audio_stop(self, project):
        config = project.configure(**SHARDS)
        survey, encode, _ = codec_stages(config)
        assert run(survey).ok
        with loading(ToyCodec()):
            read_or_make_plan(encode, restart=False)
        make_fence(encode)
        task = pickle.loads(pickle.dumps(RankTask(encode, 0, RankProfile())))
        assert run(WriteStage(project.configure(**OTHER_SHARDS)), restart=True).ok
        before = snapshot(project.dataset)
        # It was overtaken; it has not failed.
        task()
        assert snapshot(project.dataset) == before
        assert not any((project.run_dir / name).exists() for name in ("survey", "encode/toy", "assemble/toy"))
        project.encode(project.configure(**OTHER_SHARDS))

    @pytest.mark.parametrize("stage", ["prepare", "match"])
    def test_ranks_that_write_what_came_of_an_earlier_stage_stop(self, project, stage):
        """Those of a submission that was taken over."""
        config = project.configure(**SHARDS)
        (project.dataset / "cuts/cuts.000000.jsonl.gz").unlink()
        write = WriteStage(config)
        read_or_make_plan(write, restart=False)
        make_fence(write)
        task = pickle.loads(pickle.dumps(RankTask(write, 0, RankProfile())))
        encoder = mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=PitchEncoder())
        with encoder:
            assert run_dataset(config, Listener(), stages=[stage], restart=True, executor=LocalExecutor(1)).ok
        before = snapshot(project.dataset)
        # It was overtaken; it has not failed.
        task()
        assert snapshot(project.dataset) == before
        # What they had done stays: a run goes on from there.
        with encoder:
            assert run_dataset(config, Listener(), stages=["match", "write"], restart=True).ok

    def test_a_damaged_plan_can_be_begun_anew(self, project):
        """As the message about it advises."""
        config = project.configure(**SHARDS)
        project.encode(config)
        before = snapshot(project.dataset)
        assemble, write = codec_stages(config)[-1], WriteStage(config)
        for stage in (assemble, write):
            stage.dir.units.write_bytes(b"no units")
            with raises(ConfigError, "damaged_run_dir", "--restart"):
                run(stage)
            assert run(stage, restart=True).ok
        project.encode(config)
        assert snapshot(project.dataset) == before

    def test_it_waits_for_another_run_that_adds_codes(self, project, tmp_path):
        config = project.configure(**SHARDS)
        other = dataclasses.replace(config, run_dir=str(tmp_path / "other"))
        survey, encode, _ = codec_stages(other)
        assert run(survey).ok
        with loading(ToyCodec()):
            read_or_make_plan(encode, restart=False)
        before = snapshot(project.dataset)
        with raises(ConfigError, "reserved", str(tmp_path / "other")):
            run(WriteStage(project.configure(**OTHER_SHARDS)), restart=True)
        assert snapshot(project.dataset) == before


def test_a_folder_where_a_process_was_killed_before_it_wrote_anything_is_empty(tmp_path):
    dataset = ShardedDataset(tmp_path)
    (tmp_path / ".probe.0123456789abcdef0123456789abcdef.tmp").touch()
    assert dataset.is_empty()
    (tmp_path / ".notes.0123456789abcdef0123456789abcdef.tmp").touch()
    assert not dataset.is_empty()


def test_two_runs_add_codes_side_by_side(project, tmp_path):
    config = project.configure(**SHARDS)
    stages = []
    for name in ("a", "b"):
        survey, encode, assemble = codec_stages(dataclasses.replace(config, run_dir=str(tmp_path / name)), name)
        assert run(survey).ok
        with loading(ToyCodec()):
            read_or_make_plan(encode, restart=False)
        make_fence(encode)
        stages.append((encode, assemble))
    staging = project.dataset / STAGING_NAME
    assert len(list(staging.glob("*.reservation"))) == 4
    for both, left in zip(stages, (2, 0), strict=True):
        with loading(ToyCodec()):
            assert all(run(stage).ok for stage in both)
        assert len(list(staging.glob("*.reservation"))) == left
    assert not staging.exists()
    assert sorted(codec["name"] for codec in _index(project)["codecs"]) == ["a", "b"]


def test_a_finished_dataset_has_neither_host_nor_time_nor_reservations(project):
    project.encode(project.configure(**SHARDS))
    host = os.uname().nodename.encode()
    assert not any(name.startswith(".") or (len(host) > 3 and host in data) for name, data in _files(project))


def _files(project):
    return [(path.relative_to(project.dataset).as_posix(), path.read_bytes())
            for path in project.dataset.rglob("*") if path.is_file()]  # fmt: skip


def _index(project):
    return json.loads((project.dataset / "dataset.json").read_bytes())
