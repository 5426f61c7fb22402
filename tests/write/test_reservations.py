"""Reservations: two runs never write one dataset, and the second is told whose it is before it does any work."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest
from support.errors import raises
from support.pipelines import run_sharmill
from support.shar import Project, voice
from support.toy_stage import ToyStage, run

from sharmill.encode.config import EncodeConfig
from sharmill.engine.fence import make_fence
from sharmill.engine.listener import Listener
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.reservations import release_cancelled, reserve
from sharmill.engine.run import locked, run_stage
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.executors.local import LocalExecutor
from sharmill.files.staging import STAGING_NAME, token_staging
from sharmill.pipeline import make_stages, run_dataset

CHANGES = {"match": None, "write": {"shard_size": 1}, "encode": {"codecs": [{"name": "a", "model": "builtin"}]}}
FIELDS = ["codes_a+context_codes", "codes_a+target_codes", "cuts", "target_audio"]


class AtStart(Listener):
    """Does something when a stage begins, once."""

    def __init__(self, do, stage="prepare"):
        self.do, self.stage = [do], stage

    def stage_started(self, stage, units, done):
        if self.do and stage.name == self.stage:
            self.do.pop()()


class AfterUnit(Listener):
    """Ends the run after its first unit."""

    def unit_done(self, unit, commit):
        raise KeyboardInterrupt


def interrupt():
    raise KeyboardInterrupt


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path / "project")
    for number in range(2):
        project.add(f"{number}.flac", voice(0.4, seed=number))
    return project


@pytest.fixture
def config(project):
    return project.configure(**CHANGES)


def of_other_run(config, **changes):
    return dataclasses.replace(config, run_dir=config.run_dir + "-other", **changes)


def reserved(dataset):
    return sorted(path.stem for path in (dataset / STAGING_NAME).glob("*.reservation"))


def begin(config):
    """What a run does before its first stage, as one whose process is killed then."""
    run_dir = RunDir(Path(config.run_dir))
    with locked(run_dir):
        reserve(make_stages(config), restart=False)
    return run_dir


@pytest.fixture
def stage(tmp_path):
    """A toy stage that is under way, and whose process was killed."""
    stage = ToyStage(tmp_path)
    read_or_make_plan(stage, restart=False)
    make_fence(stage)
    return stage


@pytest.fixture
def other(stage):
    """A stage of another run that publishes where ``stage`` does."""
    other = ToyStage(stage.run_dir.path.parent / "other")
    other.root = stage.root
    return other


def test_a_second_run_is_refused_at_once_and_told_whose_it_is(project, config):
    other = of_other_run(config)

    def run_other():
        assert reserved(project.dataset) == FIELDS
        for stages in (None, ["prepare", "write"], ["encode"]):
            with raises(ConfigError, "reserved", socket.gethostname(), "since", config.run_dir, "sharmill cancel"):
                run_dataset(other, Listener(), stages=stages)
        assert not any(RunDir(Path(other.run_dir)).stage(name).path.exists() for name in ("prepare", "survey"))

    listener = AtStart(run_other)
    assert run_dataset(config, listener).ok
    assert listener.do == []
    assert not (project.dataset / STAGING_NAME).exists()


@pytest.mark.parametrize("restart", [False, True])
def test_what_an_unfinished_run_has_reserved_is_refused_also_on_a_restart(stage, other, restart):
    files = [f"{stage.root / STAGING_NAME / name}.reservation" for name in ("first", "last")]
    with raises(ConfigError, "reserved", str(stage.run_dir.path), *files):
        run(other, restart=restart)
    assert run(stage)[0].ok
    assert reserved(stage.root) == []


def test_only_one_of_many_gets_it(tmp_path):
    stages = [ToyStage(tmp_path / str(number)) for number in range(8)]
    outcomes = []
    barrier = threading.Barrier(len(stages))

    def attempt(stage):
        stage.root = tmp_path / "out"
        barrier.wait()
        try:
            reserve([stage], restart=False)
            outcomes.append("got")
        except ConfigError as error:
            outcomes.append(error.code)

    threads = [threading.Thread(target=attempt, args=(stage,)) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Those that meet may give back what each of them has.
    assert sorted(outcomes) in (["got"] + ["reserved"] * 7, ["reserved"] * 8)


def test_runs_that_add_codes_of_other_names_work_side_by_side(project, config):
    assert run_dataset(config, Listener(), stages=["prepare", "write"]).ok
    encode = config.section(EncodeConfig)
    one, other = (
        of_other_run(config.with_section(dataclasses.replace(encode, codecs=[codec])))
        for codec in (encode.codecs[0], dataclasses.replace(encode.codecs[0], name="b"))
    )
    other = dataclasses.replace(other, run_dir=other.run_dir + "-b")

    def run_one():
        assert run_dataset(one, Listener(), stages=["encode"]).ok
        assert reserved(project.dataset) == ["codes_b+context_codes", "codes_b+target_codes"]

    listener = AtStart(run_one, "encode/b")
    assert run_dataset(other, listener, stages=["encode"]).ok
    assert listener.do == []
    assert not (project.dataset / STAGING_NAME).exists()


def test_a_run_directory_that_was_removed_here_frees_the_directory(stage, other):
    shutil.rmtree(stage.run_dir.path)
    assert run(other)[0].ok
    assert not (stage.root / STAGING_NAME).exists()


@pytest.mark.parametrize("changes", [{"host": "node7"}, {"user": "ada"}, {"device": 0}], ids=["host", "user", "device"])
def test_one_that_cannot_be_seen_from_here_keeps_it_and_is_said_to_be_gone(stage, other, changes):
    """Elsewhere, of another user, or with a file system that is not mounted here: it may be there all the same."""
    shutil.rmtree(stage.run_dir.path)
    files = list((stage.root / STAGING_NAME).glob("*.reservation"))
    for path in files:
        path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))
    with raises(ConfigError, "reserved", "not there any more", "sharmill cancel", "remove"):
        run(other)
    assert token_staging(stage.root, stage.token).is_dir()
    for path in files:
        path.unlink()
    assert run(other)[0].ok


def test_one_in_a_private_home_is_taken_to_be_there(stage, other, monkeypatch):
    look = os.stat

    def refuse(path, *options, **more):
        if path == stage.run_dir.path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, *options, **more)

    monkeypatch.setattr(os, "stat", refuse)
    with raises(ConfigError, "reserved", str(stage.run_dir.path)) as caught:
        run(other)
    assert "not there" not in str(caught.value)


def test_one_that_was_moved_goes_on_and_keeps_it(tmp_path, stage, other):
    (tmp_path / "run").rename(tmp_path / "moved")
    stage.run_dir = RunDir(tmp_path / "moved")
    reserve([stage], restart=False)
    with raises(ConfigError, "reserved", str(tmp_path / "moved")):
        run(other)
    assert run(stage)[0].ok


def test_an_error_before_anything_is_published_leaves_no_reservation(project, config):
    with pytest.raises(KeyboardInterrupt):
        run_dataset(config, AtStart(interrupt))
    assert not (project.dataset / STAGING_NAME).exists()
    assert run_dataset(of_other_run(config), Listener(), stages=["prepare", "write"]).ok


def test_a_run_that_is_begun_again_keeps_its_reservations_and_goes_on(project, config):
    begin(config)
    begin(config)
    assert reserved(project.dataset) == FIELDS
    assert run_dataset(config, Listener()).ok
    assert reserved(project.dataset) == []


def test_one_that_is_cancelled_before_it_has_published_anything_frees_the_directory(project, config):
    """A damaged reservation of somebody else is no hindrance."""
    run_dir = begin(config)
    run_dir.config.touch()
    damaged = project.dataset / STAGING_NAME / "codes_b.reservation"
    damaged.write_text("{")
    assert run_sharmill("cancel", run_dir.path).returncode == 0
    assert reserved(project.dataset) == ["codes_b"]
    damaged.unlink()
    begin(of_other_run(config))
    with raises(ConfigError, "reserved", "run-other"):
        begin(config)


def test_what_is_cancelled_with_files_in_the_dataset_stays_reserved(project, config):
    """No other run could use it, and the files of units without a record are the run's by its reservation alone."""
    run_dir = begin(config)
    stages = make_stages(config, ["prepare", "write"])
    assert run_stage(stages[0], LocalExecutor(1), Listener(), max_reject_fraction=0.5).ok
    with pytest.raises(KeyboardInterrupt):
        run_stage(stages[1], LocalExecutor(1), AfterUnit(), max_reject_fraction=0.5)
    assert [path.stem for path in release_cancelled(run_dir)] == ["cuts", "target_audio"]
    assert reserved(project.dataset) == ["cuts", "target_audio"]
    with raises(ConfigError, "reserved"):
        begin(of_other_run(config))
    assert run_dataset(config, Listener(), stages=["write"]).ok
    assert reserved(project.dataset) == []


@pytest.mark.parametrize("restart", [False, True])
def test_files_that_came_after_the_reservation_are_not_overwritten(project, config, restart):
    begin(config)
    theirs = project.dataset / "cuts/cuts.000000.jsonl.gz"
    theirs.parent.mkdir()
    theirs.write_text("theirs")
    with raises(ConfigError, "foreign_output"):
        run_dataset(config, Listener(), stages=["prepare", "write"], restart=restart)
    assert theirs.read_text() == "theirs"
