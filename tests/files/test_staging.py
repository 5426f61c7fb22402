"""Folders of ranks, and what is published out of them."""

from __future__ import annotations

import os
import subprocess
from unittest import mock

import pytest
import xxhash

from sharmill.files.staging import STAGING_NAME, PublishedFile, Staging, remove_dead_attempts, token_staging
from sharmill.files.storage import remove_at_once


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


TOKEN = "0123456789abcdef"


def open_staging(root, *folders):
    """The staging of a rank, with the folders that the planner makes."""
    for folder in (token_staging(root, TOKEN), *(root / name for name in folders)):
        folder.mkdir(parents=True, exist_ok=True)
    return Staging(root, TOKEN)


def raise_after(written):
    return written // 0


def test_published_files_are_described_by_size_and_checksum(tmp_path):
    with open_staging(tmp_path, "a") as staging:
        staging.path("a/b").write_bytes(b"content")
        (published,) = staging.publish(["a/b"])
    assert published == PublishedFile("a/b", 7, xxhash.xxh3_64_hexdigest(b"content"))


def test_staging_leaves_nothing_after_an_error(tmp_path):
    staging = open_staging(tmp_path)
    with pytest.raises(ZeroDivisionError), staging:
        raise_after(staging.path("a/b").write_bytes(b"half"))
    assert names(tmp_path) == [STAGING_NAME, f"{STAGING_NAME}/{TOKEN}"]


@pytest.mark.parametrize("when", ["begin", "path", "publish"])
def test_staging_makes_no_folder_of_a_token_again(tmp_path, when):
    """A rank of an older plan, whose folder has been removed, is stopped at whatever it does next."""
    staging = open_staging(tmp_path, "a", "c")
    if when != "begin":
        staging.__enter__()
        staging.path("a/b").write_bytes(b"old")
    remove_at_once(token_staging(tmp_path, TOKEN))
    does = {
        "begin": staging.__enter__,
        "path": lambda: staging.path("c/d").write_bytes(b"old"),
        "publish": lambda: staging.publish(["a/b"]),
    }
    with pytest.raises(FileNotFoundError):
        does[when]()
    assert names(tmp_path) == [STAGING_NAME, "a", "c"]


def test_what_an_attempt_has_not_published_is_removed_before_the_next_one(tmp_path):
    with open_staging(tmp_path, "a") as staging:
        for name in ("a/1", "a/2"):
            staging.path(name).write_bytes(b"x")
        staging.publish(["a/2"])
        staging.path("a/never-written")
        staging.clear()
        assert list(staging.folder.iterdir()) == []
    assert names(tmp_path / "a") == ["2"]


def test_staging_makes_no_folder_of_final_files(tmp_path):
    with open_staging(tmp_path) as staging:
        staging.path("a/b").write_bytes(b"x")
        with pytest.raises(FileNotFoundError):
            staging.publish(["a/b"])
    assert not (tmp_path / "a").exists()


def test_only_folders_of_dead_processes_are_removed(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as alive, subprocess.Popen(["true"]) as dead:
        dead.wait()
        for pid in (alive.pid, dead.pid):
            with mock.patch.object(os, "getpid", return_value=pid):
                open_staging(tmp_path).folder.mkdir()
        with mock.patch("socket.gethostname", return_value="another-host"):
            open_staging(tmp_path).folder.mkdir()
        remove_dead_attempts(tmp_path, TOKEN)
        left = [path.name for path in token_staging(tmp_path, TOKEN).iterdir()]
        alive.kill()
    assert sorted(f"-{alive.pid}-" in name or "-another-host-" in name for name in left) == [True, True]


def test_another_users_folder_stays(tmp_path):
    with subprocess.Popen(["true"]) as dead:
        pass
    with mock.patch.object(os, "getpid", return_value=dead.pid):
        folder = open_staging(tmp_path).folder
    folder.mkdir()
    with mock.patch.object(os, "geteuid", return_value=os.geteuid() + 1):
        remove_dead_attempts(tmp_path, TOKEN)
    assert folder.is_dir()
    remove_dead_attempts(tmp_path, TOKEN)
    assert not folder.is_dir()


def test_two_attempts_at_a_unit_do_not_meet(tmp_path):
    with open_staging(tmp_path) as first, open_staging(tmp_path) as second:
        first.path("a").write_bytes(b"same")
        second.path("a").write_bytes(b"same")
        assert first.publish(["a"]) == second.publish(["a"])
    assert (tmp_path / "a").read_bytes() == b"same"
