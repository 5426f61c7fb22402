"""Scratch folders, in which ranks write before they publish."""

import multiprocessing
import os
import socket
import stat
import subprocess
from pathlib import Path
from unittest import mock

import pytest
from support.project import raises
from support.toy_stage import ToyStage, output_bytes, run

from sharmill.errors import DeviceError
from sharmill.files.staging import Staging


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    folder = tmp_path / "scratch"
    folder.mkdir()
    # Start the fork server now, so that its environment lacks the variable.
    forked = multiprocessing.get_context("forkserver").Process(target=bool)
    forked.start()
    forked.join()
    monkeypatch.setenv("NODE_DISK", str(folder))
    return folder


class WatchedStage(ToyStage):
    """Notes the folders in which its units are written."""

    def work(self, unit, staging, advance):
        folder = staging.path(f"first/{unit.index:06d}.txt").parent
        self.mark("written", f"{folder.parent} {stat.S_IMODE(folder.stat().st_mode):o}")
        return super().work(unit, staging, advance)


def make_stage(folder, scratch="$NODE_DISK", **options):
    return WatchedStage(folder, scratch=scratch, **options)


def test_units_are_written_there_and_the_bytes_are_the_same(tmp_path, scratch):
    stage, plain = make_stage(tmp_path / "a"), make_stage(tmp_path / "b", scratch=None)
    assert run(stage)[0].ok
    assert run(plain)[0].ok
    assert set(stage.marked("written")) == {f"{scratch} 700"}
    assert output_bytes(stage) == output_bytes(plain)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_folder_ends_the_stage_and_is_left_empty(tmp_path, scratch, workers):
    full = f"cannot write {scratch}/sharmill-rank-"
    with raises(DeviceError, "disk", full, f"on {socket.gethostname()}: No space left on device", "free space"):
        run(make_stage(tmp_path, behaviour={2: "full"}), workers)
    assert list(scratch.iterdir()) == []
    assert run(make_stage(tmp_path))[0].ok


def test_a_rank_that_finds_it_full_is_given_up_alone(tmp_path, scratch):
    stage = make_stage(tmp_path, behaviour={2: "full_once"})
    result, heard = run(stage, 2)
    assert (result.ok, heard.failed) == (True, {})
    assert stage.attempts()[2] == 2
    [sentence] = result.given_up
    assert "No space left on device" in sentence


@pytest.mark.parametrize("name", ["$NO_SUCH_VARIABLE", "/no/such/folder", "relative"])
def test_a_missing_folder_is_named(tmp_path, name):
    with raises(DeviceError, "disk", f"executor.scratch {name} is not a folder on {socket.gethostname()}"):
        run(make_stage(tmp_path, scratch=name))


def test_folders_of_killed_ranks_are_removed_and_others_stay(tmp_path, scratch):
    with subprocess.Popen(["true"]) as ended:
        pass

    def make_folder(pid: int) -> Path:
        with mock.patch.object(os, "getpid", return_value=pid):
            folder = scratch / f"sharmill-{Staging(Path(), '0' * 16).folder.name}"
        (folder / "inside").mkdir(parents=True)
        return folder

    gone, alive = make_folder(ended.pid), make_folder(os.getpid())
    # The id of a process at work in another container, or on another host, may not exist here.
    with mock.patch("socket.gethostname", return_value="other-host"):
        elsewhere = make_folder(ended.pid)
    with mock.patch("sharmill.files.staging.this_kernel", return_value="the same boot/another PID namespace"):
        in_container = make_folder(ended.pid)
    foreign = scratch / gone.name.rpartition("-")[0]  # the name of no process
    foreign.mkdir()
    assert run(make_stage(tmp_path))[0].ok
    assert set(scratch.iterdir()) == {alive, elsewhere, in_container, foreign}
