"""A dataset directory is claimed when a run begins, before it has anything to publish, until it has come to an end."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest
from support.errors import raises
from support.pipelines import run_sharmill
from support.shar import Project, voice

from sharmill.engine.fence import claim_for_run, release_run, release_unused
from sharmill.engine.listener import Listener
from sharmill.engine.run import locked, run_stage
from sharmill.engine.run_notes import Given, begin_run, read_given
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.executors.local import LocalExecutor
from sharmill.executors.slurm.queue import make_run_id
from sharmill.pipeline import make_stages, run_dataset
from sharmill.staging import STAGING_NAME

CHANGES = {"match": None, "write": {"shard_size": 1}, "encode": {"codecs": [{"name": "a", "model": "builtin"}]}}
FIELDS = ["codes_a+context_codes", "codes_a+target_codes", "cuts", "target_audio"]


class AtStart(Listener):
    """Does something when the first stage begins."""

    def __init__(self, do):
        self.do = [do]

    def stage_started(self, stage, units, done):
        if self.do:
            self.do.pop()()


class AfterUnit(Listener):
    """Ends the run after its first unit."""

    def unit_done(self, unit, commit):
        raise KeyboardInterrupt


class AfterStage(Listener):
    """Ends the run when the stage behind this one begins."""

    def __init__(self, name):
        self.name, self.has_begun = name, False

    def stage_started(self, stage, units, done):
        if self.has_begun:
            raise KeyboardInterrupt
        self.has_begun = stage.name == self.name


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


def claims(project):
    return sorted(path.stem for path in (project.dataset / STAGING_NAME).glob("*.claim"))


def begin(config):
    """What a run does before its first stage, as one whose process is killed then."""
    run_dir = RunDir(Path(config.run_dir))
    with locked(run_dir):
        claim_for_run(make_stages(config), restart=False)
    return run_dir


def write(config):
    """Run the first stages as far as files are in the dataset directory."""
    for stage in make_stages(config, ["prepare", "write"]):
        assert run_stage(stage, LocalExecutor(1), Listener(), max_reject_fraction=0.5).ok


def test_a_second_run_is_refused_at_once_and_told_whose_it_is(project, config):
    other = of_other_run(config)

    def run_other():
        assert claims(project) == FIELDS
        for stages in (None, ["prepare", "write"], ["encode"]):
            with raises(ConfigError, "claimed", socket.gethostname(), "since", config.run_dir, "sharmill cancel"):
                run_dataset(other, Listener(), stages=stages)
        assert not any(RunDir(Path(other.run_dir)).stage(name).path.exists() for name in ("prepare", "survey"))

    listener = AtStart(run_other)
    assert run_dataset(config, listener).ok
    assert listener.do == []
    assert not (project.dataset / STAGING_NAME).exists()


def interrupt():
    raise KeyboardInterrupt


def test_an_error_before_anything_is_published_leaves_no_claim(project, config):
    with pytest.raises(KeyboardInterrupt):
        run_dataset(config, AtStart(interrupt))
    assert not (project.dataset / STAGING_NAME).exists()
    assert run_dataset(of_other_run(config), Listener(), stages=["prepare", "write"]).ok


def test_what_is_to_begin_anew_does_so_in_a_later_run_too(config):
    """On SLURM all stages but the first are left to later jobs, and a run may be killed."""
    stages = ["prepare", "write", "survey"]
    assert run_dataset(config, Listener(), stages=stages).ok
    before = {stage.name: stage.dir.read_token() for stage in make_stages(config, stages)}
    other = dataclasses.replace(config, write=dataclasses.replace(config.write, shard_size=2))
    with pytest.raises(KeyboardInterrupt):
        run_dataset(other, AfterStage("prepare"), stages=stages, restart=True)
    assert run_dataset(other, Listener(), stages=stages).ok
    after = {stage.name: stage.dir.read_token() for stage in make_stages(config, stages)}
    assert not set(before.items()) & set(after.items())
    assert run_dataset(other, Listener(), stages=stages).ok
    assert {stage.name: stage.dir.read_token() for stage in make_stages(config, stages)} == after


def test_a_run_that_takes_over_from_jobs_elsewhere_ends_their_run(config, monkeypatch):
    """Else each later command would refuse for its sake."""
    monkeypatch.setattr("sharmill.executors.slurm.queue.ask", lambda command, patience: "")  # an empty queue
    run_dir = RunDir(Path(config.run_dir))
    run_dir.path.mkdir(parents=True)
    make_run_id(run_dir)
    begin_run(run_dir, Given(stages=["prepare"], cluster="elsewhere"))
    with raises(ConfigError, "jobs_elsewhere", "submit or run --take-over"):
        run_dataset(config, Listener(), stages=[])
    run_dataset(config, Listener(), stages=[], take_over=True)
    run_dataset(config, Listener(), stages=[])
    assert read_given(run_dir).cluster == ""


def test_one_that_is_begun_again_keeps_its_claims_and_goes_on(project, config):
    begin(config)
    assert claims(project) == FIELDS
    begin(config)
    assert run_dataset(config, Listener(), stages=["prepare", "write"]).ok
    assert claims(project) == []


def test_runs_that_add_codes_of_other_names_begin_side_by_side(project, config):
    write(config)
    one, other = (
        of_other_run(config, encode=dataclasses.replace(config.encode, codecs=[codec]))
        for codec in (config.encode.codecs[0], dataclasses.replace(config.encode.codecs[0], name="b"))
    )
    other = dataclasses.replace(other, run_dir=other.run_dir + "-b")

    def run_one():
        assert run_dataset(one, Listener(), stages=["encode"]).ok
        assert claims(project) == ["codes_b+context_codes", "codes_b+target_codes"]

    assert run_dataset(other, AtStart(run_one), stages=["encode"]).ok
    assert not (project.dataset / STAGING_NAME).exists()


def test_a_claim_that_is_given_up_frees_the_directory(project, config):
    run_dir = begin(config)
    assert release_unused(run_dir) == []
    assert not (project.dataset / STAGING_NAME).exists()
    begin(of_other_run(config))
    with raises(ConfigError, "claimed", "run-other"):
        begin(config)


def test_what_is_given_up_with_files_in_the_dataset_stays_claimed(project, config):
    """No other run could use it, and the files of units without a record are the run's by its claims alone."""
    run_dir = begin(config)
    stages = make_stages(config, ["prepare", "write"])
    assert run_stage(stages[0], LocalExecutor(1), Listener(), max_reject_fraction=0.5).ok
    with pytest.raises(KeyboardInterrupt):
        run_stage(stages[1], LocalExecutor(1), AfterUnit(), max_reject_fraction=0.5)
    assert [path.stem for path in release_unused(run_dir)] == ["cuts", "target_audio"]
    assert claims(project) == ["cuts", "target_audio"]
    with raises(ConfigError, "claimed"):
        begin(of_other_run(config))
    assert run_dataset(config, Listener(), stages=["write"]).ok
    assert claims(project) == []


def test_a_damaged_claim_of_another_run_does_not_keep_those_that_are_given_up(project, config):
    """By ``sharmill cancel``, after the run was killed."""
    run_dir = begin(config)
    run_dir.config.touch()
    (project.dataset / STAGING_NAME / "codes_b.claim").write_text("{")
    assert run_sharmill("cancel", run_dir.path).returncode == 0
    assert claims(project) == ["codes_b"]


def test_a_damaged_token_is_named(config):
    run_dir = begin(config)
    run_dir.claim.write_text('{"token": "../..", "directory": "/"}')
    with raises(ConfigError, "damaged_run_dir", str(run_dir.claim)):
        release_run(run_dir)
