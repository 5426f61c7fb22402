"""Scratch folders, in which ranks write before they publish."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from pathlib import Path
from unittest import mock

import pytest
from support.errors import raises
from support.full_scratch import WatchedStage
from support.toy_stage import output_bytes, run

from sharmill.errors import DeviceError, FatalError
from sharmill.files.staging import STAGING_NAME, Staging


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("NODE_DISK", str(folder))
    return folder


def make_stage(folder, scratch="$NODE_DISK") -> WatchedStage:
    stage = WatchedStage(folder)
    stage.scratch = scratch
    return stage


def test_units_are_written_there_and_the_bytes_are_the_same(tmp_path, scratch):
    stage, plain = make_stage(tmp_path / "a"), make_stage(tmp_path / "b", scratch=None)
    assert run(stage)[0].ok
    assert run(plain)[0].ok
    assert set(stage.marked("written")) == {f"{scratch} 700"}
    assert output_bytes(stage) == output_bytes(plain)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_where_it_is_full_for_all_ranks_it_is_named_and_left_empty(tmp_path, scratch, workers):
    stage = make_stage(tmp_path)
    stage.full = 2
    full = f"cannot write {scratch}/sharmill-rank-"
    with raises(DeviceError, "disk", full, f"on {socket.gethostname()}: No space left on device", "make room"):
        run(stage, workers)
    assert list(scratch.iterdir()) == []
    stage.full = -1
    assert run(stage)[0].ok


def test_a_rank_that_finds_it_full_is_given_up_alone(tmp_path, scratch):
    stage = make_stage(tmp_path)
    stage.full, stage.once = 2, True
    result, heard = run(stage, 2)
    assert (result.ok, heard.failed) == (True, {})
    assert stage.attempts()[2] == 1
    [sentence] = result.given_up
    assert "No space left on device" in sentence


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_one_in_which_nothing_can_be_made_is_an_error_of_its_node(tmp_path, scratch, number, monkeypatch):
    make = Path.mkdir

    def refuse(path, *arguments, **options):
        if path.parent == scratch:
            raise OSError(number, os.strerror(number))
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with raises(DeviceError, "disk", f"cannot write {scratch}/", os.strerror(number)) as caught:
        run(make_stage(tmp_path))
    assert caught.value.place == socket.gethostname()


@pytest.mark.parametrize("name", ["$NO_SUCH_VARIABLE", "/no/such/folder", "relative"])
def test_one_that_is_not_there_is_named(tmp_path, name):
    with raises(DeviceError, "disk", f"executor.scratch {name} is no folder on {socket.gethostname()}"):
        run(make_stage(tmp_path, scratch=name))


def test_what_killed_ranks_left_there_goes_and_what_is_at_work_stays(tmp_path, scratch):
    with subprocess.Popen(["true"]) as ended:
        pass

    def make_folder(pid: int) -> Path:
        with mock.patch.object(os, "getpid", return_value=pid):
            folder = scratch / f"sharmill-{Staging(Path(), '0' * 16).folder.name}"
        (folder / "inside").mkdir(parents=True)
        return folder

    gone, alive = make_folder(ended.pid), make_folder(os.getpid())
    # In a container with the same host name, the number of a process that is at work may be none here.
    with mock.patch("socket.gethostname", return_value="other-host"):
        elsewhere = make_folder(ended.pid)
    with mock.patch("sharmill.files.staging.this_kernel", return_value="the same boot/another PID namespace"):
        in_container = make_folder(ended.pid)
    foreign = scratch / gone.name.rpartition("-")[0]  # the name of no process
    foreign.mkdir()
    assert run(make_stage(tmp_path))[0].ok
    assert set(scratch.iterdir()) == {alive, elsewhere, in_container, foreign}


def test_a_copy_that_does_not_fit_beside_the_dataset_leaves_nothing(tmp_path, scratch, monkeypatch):
    def copy(source, goal, **options):
        goal.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sharmill.files.staging.shutil.copyfile", copy)
    stage = make_stage(tmp_path)
    with raises(FatalError, "disk", f"cannot write {stage.root}:"):
        run(stage)
    assert list((stage.root / STAGING_NAME).rglob("*.txt")) == []
