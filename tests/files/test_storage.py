"""Atomic publishing, staging folders of ranks, and disks that cannot be written to."""

import errno
import os
import subprocess
import threading
from contextlib import suppress
from itertools import count
from unittest import mock

import pytest
from support.project import raises

from sharmill.errors import ConfigError, FatalError
from sharmill.files.atomic import remove, remove_at_once, remove_temp_files, require_writable, temp_path, write_atomic
from sharmill.files.disk import PUT_BACK, disk_errors
from sharmill.files.regular import open_regular
from sharmill.files.staging import STAGING_NAME, Staging, remove_dead_attempts, token_staging


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_folder_goes_at_once_though_another_process_fills_it(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    stop = threading.Event()

    def fill():
        for number in count():
            with suppress(FileNotFoundError):
                (folder / str(number)).write_bytes(b"x")
            if stop.is_set():
                return

    writer = threading.Thread(target=fill)
    writer.start()
    for _ in range(50):
        remove_at_once(folder)
        assert names(tmp_path) == []
        folder.mkdir()
    stop.set()
    writer.join()
    # Leftovers of a process that was killed in the meantime.
    for name in ("folder", "other"):
        temp_path(tmp_path / name).mkdir()
    remove_at_once(folder)
    remove_at_once(folder)
    assert [name.split(".")[1] for name in names(tmp_path)] == ["other"]


def test_only_temporary_files_of_killed_processes_are_removed(tmp_path):
    for name in ("kept", ".kept.tmp", ".hidden", "below/kept"):
        write_atomic(tmp_path / name, b"")
    for name in ("mine", "others", "below/mine"):
        temp_path(tmp_path / name).touch()
    remove_temp_files(tmp_path, {"mine"})
    assert [name.split(".")[1] for name in names(tmp_path) if name.endswith(".tmp")] == ["kept", "others", "mine"]
    remove_temp_files(tmp_path)
    remove_temp_files(tmp_path / "below")
    assert names(tmp_path) == [".hidden", ".kept.tmp", "below", "below/kept", "kept"]


def test_removing_takes_a_link_and_not_what_it_points_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    remove(tmp_path / "link")
    assert names(tmp_path) == ["real", "real/file"]


@pytest.mark.parametrize("name", [".", "new/folder"])
def test_read_only_disk_is_a_configuration_error_before_any_work(name, small_disk):
    disk = small_disk("64k")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with raises(ConfigError, "disk", str(disk / name), "ead-only"):
        require_writable(disk / name)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_file_in_the_place_of_a_folder(name, tmp_path):
    (tmp_path / "file").touch()
    with raises(ConfigError, "disk", str(tmp_path / name)):
        require_writable(tmp_path / name)


@pytest.mark.parametrize(("remedy", "names"), [((), ["--restart"]), ((PUT_BACK,), [f"directory; {PUT_BACK} run"])])
def test_a_missing_file_has_the_remedy_of_its_place(remedy, names, tmp_path):
    with raises(FatalError, "disk", str(tmp_path / "file"), *names), disk_errors(tmp_path, *remedy):
        (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_a_file_of_which_another_has_a_lease_is_waited_for(append, linked, tmp_path, monkeypatch):
    """Linux answers nonblocking opens like this; a FIFO is not waited for."""
    opened = os.open

    def open_leased(path, flags, *rest, **options):
        if flags & os.O_NONBLOCK:
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable", os.fspath(path))
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", open_leased)
    (tmp_path / "file").write_bytes(b"1")
    if linked:
        (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / ("link" if linked else "file"), append=append) as stream:
        assert (stream.write(b"2") if append else stream.read()) in (1, b"1")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BlockingIOError):
        open_regular(tmp_path / "fifo")


TOKEN = "0123456789abcdef"


def open_staging(root, *folders):
    """The staging of a rank, with the folders that the planner creates."""
    for folder in (token_staging(root, TOKEN), *(root / name for name in folders)):
        folder.mkdir(parents=True, exist_ok=True)
    return Staging(root, TOKEN)


def test_files_for_a_deleted_plan_are_not_published(tmp_path):
    staging = open_staging(tmp_path, "a")
    with staging:
        staging.path("a/b").write_bytes(b"old")
        remove_at_once(token_staging(tmp_path, TOKEN))
        with pytest.raises(FileNotFoundError):
            staging.publish(["a/b"])
    assert names(tmp_path) == [STAGING_NAME, "a"]


def test_another_users_folder_stays(tmp_path):
    with subprocess.Popen(["true"]) as dead:
        pass
    with mock.patch.object(os, "getpid", return_value=dead.pid):
        folder = open_staging(tmp_path).folder
    folder.mkdir()
    with mock.patch.object(os, "geteuid", return_value=os.geteuid() + 1):
        remove_dead_attempts(token_staging(tmp_path, TOKEN))
    assert folder.is_dir()
    remove_dead_attempts(token_staging(tmp_path, TOKEN))
    assert not folder.is_dir()
