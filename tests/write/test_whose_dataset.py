"""Ownership of a dataset: only its own run may write it, as reservations or the content prove.

A second run is refused with the name of the owner before any work.
"""

import dataclasses
import json
import pickle
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from support.project import (
    Project,
    ToyCodec,
    codec_stages,
    lines,
    loading,
    raises,
    run,
    run_sharmill,
    snapshot,
    stage_of,
    voice,
)
from support.toy_stage import ToyStage, run as run_toy

from sharmill.encode.config import EncodeConfig
from sharmill.engine.executor import Listener
from sharmill.engine.fence import make_fence, reserve
from sharmill.engine.order import make_stages
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.run import locked
from sharmill.engine.run_dir import RunDir
from sharmill.errors import ConfigError
from sharmill.executors.slurm.executor import RankTask
from sharmill.executors.slurm.profile import RankProfile
from sharmill.files.staging import STAGING_NAME, token_staging
from sharmill.pipeline import run_dataset
from sharmill.write.config import WriteConfig

SHARDS = {"write": {"shard_size": 2}, "match": {"min_duration": 0.0}}
OTHER_SHARDS = SHARDS | {"write": {"shard_size": 5}}
CODEC = {"name": "a", "model": "builtin"}
WHOLE = {"match": None, "write": {"shard_size": 1}, "encode": {"codecs": [CODEC]}}
restarts = pytest.mark.parametrize("restart", [False, True])


def make_project(folder, seed=0):
    folder.mkdir(exist_ok=True)
    project = Project(folder)
    for number in range(5):
        project.add(f"{number}.flac", voice(0.4, seed=10 * seed + number))
    return project


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a project with a finished dataset of three shards."""
    project = make_project(tmp_path_factory.mktemp("project") / "project")
    project.write(**SHARDS)
    return project.folder


@pytest.fixture
def project(finished, tmp_path):
    """Return a copy of a run, with run directory and dataset directory moved together."""
    shutil.copytree(finished, tmp_path / "project")
    return make_project(tmp_path / "project")


@pytest.fixture
def config(tmp_path):
    """A dataset of two recordings, with codes, of which nothing is made yet."""
    return Project(tmp_path / "new").add_voices([0.4, 0.4]).configure(**WHOLE)


def at(config, suffix, **changes):
    """Return the configuration of another run."""
    return dataclasses.replace(config, run_dir=config.run_dir + suffix, **changes)


class AtStart(Listener):
    """Does something when a stage begins, once."""

    def __init__(self, do, stage="prepare"):
        self.do, self.stage = [do], stage

    def stage_started(self, stage, units, done):
        if self.do and stage.name == self.stage:
            self.do.pop()()


def reserved(dataset):
    files = Path(dataset, STAGING_NAME).glob("*.reservation")
    return sorted(folder for path in files for folder in json.loads(path.read_bytes())["folders"])


def begin(config):
    """Do the steps of a run before its first stage, as if its process were killed then."""
    run_dir = RunDir(Path(config.run_dir))
    with locked(run_dir):
        reserve(make_stages(config), restart=False)
    return run_dir


class TestMoved:
    def test_a_lone_stage_resumes_in_the_configured_directory(self, project, tmp_path):
        before = {name: data for name, data in snapshot(project.dataset).items() if "/" in name}
        project.dataset = project.dataset.rename(tmp_path / "elsewhere")
        config = project.configure(**SHARDS)
        assert run(stage_of(config, "write")).ok
        project.encode(config)
        assert before.items() <= snapshot(project.dataset).items()
        assert run(stage_of(project.configure(**OTHER_SHARDS), "write"), restart=True).ok
        assert len(list((project.dataset / "cuts").iterdir())) == 1

    def test_away_a_relaunch_says_so_and_a_restart_writes_it_anew(self, project, tmp_path):
        before = snapshot(project.dataset)
        project.dataset.rename(tmp_path / "elsewhere")
        with raises(ConfigError, "no_dataset", "move it back"):
            run(stage_of(project.configure(**SHARDS), "write"))
        assert run(stage_of(project.configure(**SHARDS), "write"), restart=True).ok
        assert snapshot(project.dataset) == snapshot(tmp_path / "elsewhere") == before


class TestOfAnother:
    @restarts
    @pytest.mark.parametrize("begun", [False, True])
    def test_it_is_neither_overwritten_nor_removed(self, project, tmp_path, restart, begun):
        theirs = make_project(tmp_path / "theirs", seed=1)
        config = theirs.configure(**SHARDS)
        theirs.match_by_hand(config)
        if begun:
            assert run(stage_of(config, "write")).ok
            shutil.rmtree(theirs.dataset)
        shutil.copytree(project.dataset, theirs.dataset)
        before = snapshot(theirs.dataset)
        with raises(ConfigError, "foreign_output"):
            run(stage_of(config, "write"), restart=restart)
        assert snapshot(theirs.dataset) == before

    @restarts
    def test_existing_codes_of_the_same_name_are_kept(self, project, restart):
        config = project.configure(**SHARDS)
        project.encode(config)
        before = snapshot(project.dataset)
        with loading(ToyCodec()), raises(ConfigError, "foreign_output"):
            run(codec_stages(at(config, "-other"))[1], restart=restart)
        assert snapshot(project.dataset) == before

    @restarts
    def test_files_added_after_the_reservation_are_kept(self, config, restart):
        begin(config)
        theirs = Path(config.dataset_dir, "cuts/cuts.000000.jsonl.gz")
        theirs.parent.mkdir()
        theirs.write_text("theirs")
        with raises(ConfigError, "foreign_output"):
            run_dataset(config, Listener(), stages=["prepare", "write"], restart=restart)
        assert theirs.read_text() == "theirs"


class TestRestart:
    def test_files_that_no_plan_names_stay(self, project):
        names = ("dataset/notes.txt", "dataset/cuts/notes.txt", "dataset/codes_mine/notes.txt",
                 "run/write/notes.txt", "run/write/logs/notes.txt")  # fmt: skip
        mine = [project.folder / name for name in names]
        for path in mine:
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine")
        assert run(stage_of(project.configure(**OTHER_SHARDS), "write"), restart=True).ok
        assert all(path.read_text() == "mine" for path in mine)
        assert len(list((project.dataset / "cuts").glob("*.gz"))) == 1

    def test_one_that_is_killed_is_done_by_a_later_run_too(self, config):
        """On SLURM all stages but the first are left to later jobs."""

        def tokens():
            return {name: RunDir(Path(config.run_dir)).stage(name).read_token() for name in ("prepare", "write")}

        stages = ["prepare", "write"]
        assert run_dataset(config, Listener(), stages=stages).ok
        before = tokens()
        config = config.with_section(dataclasses.replace(config.section(WriteConfig), shard_size=5))
        with pytest.raises(KeyboardInterrupt):
            run_dataset(config, AtStart(mock.Mock(side_effect=KeyboardInterrupt), "write"), stages=stages, restart=True)
        assert run_dataset(config, Listener(), stages=stages).ok
        after = tokens()
        assert not before.items() & after.items()
        assert run_dataset(config, Listener(), stages=stages).ok
        assert tokens() == after

    def test_ranks_that_encode_the_old_audio_stop(self, project):
        segments, encode, _ = codec_stages(project.configure(**SHARDS))
        assert run(segments).ok
        with loading(ToyCodec()):
            planned, _ = read_or_make_plan(encode)
        make_fence(planned)
        task = pickle.loads(pickle.dumps(RankTask(planned, 0, RankProfile())))
        assert run(stage_of(project.configure(**OTHER_SHARDS), "write"), restart=True).ok
        before = snapshot(project.dataset)
        # It was overtaken; it has not failed.
        task()
        assert snapshot(project.dataset) == before
        assert not list(project.run_dir.glob("encode*"))
        project.encode(project.configure(**OTHER_SHARDS))


class TestReserved:
    def test_a_second_run_is_refused_at_once_and_told_whose_it_is(self, config):
        other = at(config, "-other")
        folders = ["codes_a/context_codes", "codes_a/target_codes", "cuts", "target_audio"]

        def run_other():
            assert reserved(config.dataset_dir) == folders
            for options in ({}, {"restart": True}, {"stages": ["prepare", "write"]}, {"stages": ["encode"]}):
                with raises(ConfigError, "reserved", socket.gethostname(), "since", config.run_dir, "sharmill cancel"):
                    run_dataset(other, Listener(), **options)
            assert not any(Path(other.run_dir, name).exists() for name in ("prepare", "encode.segments"))

        listener = AtStart(run_other)
        assert run_dataset(config, listener).ok
        assert listener.do == []
        assert not Path(config.dataset_dir, STAGING_NAME).exists()

    def test_only_one_of_many_gets_it(self, tmp_path):
        barrier = threading.Barrier(8)

        def attempt(number):
            stage = ToyStage(tmp_path / str(number))
            stage.root = tmp_path / "out"
            barrier.wait()
            try:
                reserve([stage.in_run], restart=False)
            except ConfigError as error:
                return error.code
            return "got"

        with ThreadPoolExecutor(8) as pool:
            outcomes = sorted(pool.map(attempt, range(8)))
        # Runs that collide may each release their partial reservations.
        assert outcomes in (["got"] + ["reserved"] * 7, ["reserved"] * 8)

    def test_runs_that_add_codes_of_other_names_work_side_by_side(self, config):
        assert run_dataset(config, Listener(), stages=["prepare", "write"]).ok
        encode = config.section(EncodeConfig)
        codec = dataclasses.replace(encode.codecs[0], name="b")
        one, other = at(config, "-a"), at(config.with_section(dataclasses.replace(encode, codecs=[codec])), "-b")

        def run_one():
            assert run_dataset(one, Listener(), stages=["encode"]).ok
            assert reserved(config.dataset_dir) == ["codes_b/context_codes", "codes_b/target_codes"]

        listener = AtStart(run_one, "encode/b")
        assert run_dataset(other, listener, stages=["encode"]).ok
        assert listener.do == []
        assert not Path(config.dataset_dir, STAGING_NAME).exists()

    @pytest.mark.parametrize("changes", [{}, {"host": "node7"}, {"user": "ada"}, {"device": 0}], ids=str)
    def test_a_removed_run_directory_frees_the_dataset_directory(self, tmp_path, changes):
        """The run directory of another host, user or unmounted file system may still exist."""
        stage, other = ToyStage(tmp_path), ToyStage(tmp_path / "other")
        other.root = stage.root
        planned, _ = read_or_make_plan(stage.in_run)
        make_fence(planned)
        shutil.rmtree(stage.run_dir.path)
        (file,) = (stage.root / STAGING_NAME).glob("*.reservation")
        file.write_text(json.dumps(lines(file)[0] | changes))
        if changes:
            with raises(ConfigError, "reserved", "first, last", "no longer exists", "sharmill cancel", str(file)):
                run_toy(other)
            assert token_staging(stage.root, planned.token).is_dir()
            file.unlink()
        assert run_toy(other)[0].ok
        assert changes or not (stage.root / STAGING_NAME).exists()

    def test_a_copied_run_directory_cannot_affect_the_original(self, config, tmp_path):
        run_dir = begin(config)
        run_dir.config.touch()
        ranks = token_staging(Path(config.dataset_dir), f"{run_dir.read_id()}-{16 * '0'}")
        ranks.mkdir()
        copied = Path(shutil.copytree(run_dir.path, f"{config.run_dir}-copy"))
        assert "copy of that run directory" in " ".join(run_sharmill("cancel", copied, status=2).stderr.split())
        for restart in (False, True):
            with raises(ConfigError, "reserved", "copy of that run directory", config.run_dir):
                run_dataset(at(config, "-copy"), Listener(), restart=restart)
        assert ranks.is_dir()
        # A moved run directory is still the same run.
        run_sharmill("cancel", run_dir.path.rename(tmp_path / "moved"))
        assert not ranks.exists()

    def test_a_project_that_was_moved_by_copying_goes_on(self, config, tmp_path):
        begin(config)
        moved = {key: str(tmp_path / f"moved-{key}") for key in ("run_dir", "dataset_dir")}
        for key, place in moved.items():
            shutil.copytree(getattr(config, key), place)
            shutil.rmtree(getattr(config, key))
        assert run_dataset(dataclasses.replace(config, **moved), Listener()).ok

    def test_a_run_cancelled_before_publishing_frees_the_directory(self, config):
        """A damaged reservation of another user is ignored."""
        run_dir = begin(config)
        run_dir.config.touch()
        damaged = Path(config.dataset_dir, STAGING_NAME, "damaged.reservation")
        damaged.write_text("{")
        run_sharmill("cancel", run_dir.path)
        assert list(damaged.parent.iterdir()) == [damaged]
        damaged.unlink()
        begin(at(config, "-other"))
        with raises(ConfigError, "reserved", "run-other"):
            begin(config)
