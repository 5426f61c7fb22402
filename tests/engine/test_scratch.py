"""Scratch folders, in which ranks write before they publish."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from support.errors import raises
from support.full_scratch import WatchedStage
from support.toy_stage import output_bytes, run

from sharmill.engine.plan import read_or_make_plan
from sharmill.errors import DeviceError, FatalError
from sharmill.staging import STAGING_NAME, Staging, remove_dead_attempts, token_staging


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
    host, full = socket.gethostname(), f"cannot write {scratch}/sharmill-rank-"
    with raises(DeviceError, "disk", full, f"on {host}: No space left on device", "make room") as caught:
        run(stage, workers)
    assert caught.value.place == host
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


def test_a_full_disk_of_all_nodes_ends_the_stage(tmp_path):
    stage = make_stage(tmp_path, scratch=None)
    stage.full = 2
    with raises(FatalError, "disk", f"cannot write {stage.root}") as caught:
        run(stage)
    assert type(caught.value) is FatalError


@pytest.mark.parametrize("name", ["$NO_SUCH_VARIABLE", "/no/such/folder", "relative"])
def test_one_that_is_not_there_is_named(tmp_path, name):
    with raises(DeviceError, "disk", f"executor.scratch {name} is no folder on {socket.gethostname()}"):
        run(make_stage(tmp_path, scratch=name))


def name_of(pid: int, number: int = 0x123) -> str:
    """Returns the name of the folder of a process that is or was here."""
    with mock.patch.object(os, "getpid", return_value=pid):
        begin, _, _ = Staging(Path(), "0" * 16).folder.name.rpartition("-")
    return f"{begin}-{number:x}"


def test_what_killed_ranks_left_there_goes_and_what_is_at_work_stays(tmp_path, scratch):
    with subprocess.Popen(["true"]) as ended:
        pass
    gone, alive = (scratch / f"sharmill-{name_of(pid)}" for pid in (ended.pid, os.getpid()))
    others = [alive]
    # In a container with the same host name, the number of a process that is at work may be none here.
    for place, name in (
        ("socket.gethostname", "other-host"),
        ("sharmill.staging.this_kernel", "the same boot/another PID namespace"),
    ):
        with mock.patch(place, return_value=name):
            others.append(scratch / f"sharmill-{name_of(ended.pid)}")
    for folder in (gone, *others):
        (folder / "inside").mkdir(parents=True)
    assert run(make_stage(tmp_path))[0].ok
    assert sorted(scratch.iterdir()) == sorted(others)


def test_ranks_that_begin_together_remove_what_is_left_together(tmp_path, scratch):
    with subprocess.Popen(["true"]) as ended:
        pass
    for number in range(100):
        folder = scratch / f"sharmill-{name_of(ended.pid, number)}"
        folder.mkdir()
        for name in "abc":
            (folder / name).touch()
    token_staging(tmp_path, "0" * 16).mkdir(parents=True)
    begin = threading.Barrier(4)

    def rank(number):
        begin.wait()
        with Staging(tmp_path, "0" * 16, scratch):
            pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(rank, range(4)))
    assert list(scratch.iterdir()) == []


def test_folders_that_are_not_of_a_process_stay(tmp_path, scratch):
    here = name_of(1).removesuffix("1-123")
    names = [f"{here}99999999999999999999-0", f"{here}x-0", f"{here}0", f"{here}other-1-0"]
    for name in names:
        (scratch / f"sharmill-{name}").mkdir()
    stage = make_stage(tmp_path)
    read_or_make_plan(stage, restart=False)
    staging = token_staging(stage.root, stage.token)
    for name in names:
        (staging / name).mkdir(parents=True)
    remove_dead_attempts(stage.root, stage.token)
    assert sorted(path.name for path in staging.iterdir()) == sorted(names)
    assert run(stage)[0].ok
    assert sorted(path.name for path in scratch.iterdir()) == sorted(f"sharmill-{name}" for name in names)


def test_a_copy_that_does_not_fit_beside_the_dataset_leaves_nothing(tmp_path, scratch, monkeypatch):
    def copy(source, goal, **options):
        goal.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sharmill.staging.shutil.copyfile", copy)
    stage = make_stage(tmp_path)
    with raises(FatalError, "disk", f"cannot write {stage.root}:"):
        run(stage)
    assert list((stage.root / STAGING_NAME).rglob("*.txt")) == []
