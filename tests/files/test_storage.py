"""Atomic publishing, and what happens where nothing can be written."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
from support.errors import raises

from sharmill.errors import ConfigError, FatalError
from sharmill.files import storage as store
from sharmill.files.storage import (
    create_atomic,
    disk_errors,
    open_atomic,
    open_regular,
    path_aside,
    publish_directory,
    refuse_strangers,
    remove_asides,
    remove_at_once,
    remove_tree,
    require_writable,
    write_atomic,
)


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def fail_after(written):
    return written // 0


def test_open_atomic_publishes_the_content(tmp_path):
    with open_atomic(tmp_path / "new/folder/file") as stream:
        stream.write(b"content")
        assert not (tmp_path / "new/folder/file").exists()
    assert (tmp_path / "new/folder/file").read_bytes() == b"content"
    assert names(tmp_path) == ["new", "new/folder", "new/folder/file"]


def test_open_atomic_leaves_nothing_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), open_atomic(tmp_path / "file") as stream:
        fail_after(stream.write(b"half"))
    assert names(tmp_path) == []


def test_open_atomic_leaves_the_earlier_file_after_an_error(tmp_path):
    write_atomic(tmp_path / "file", b"earlier")
    with pytest.raises(ZeroDivisionError), open_atomic(tmp_path / "file") as stream:
        fail_after(stream.write(b"half"))
    assert (tmp_path / "file").read_bytes() == b"earlier"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_created_once_and_whole(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(store.os, "link", mock.Mock(side_effect=OSError(errno.EPERM, "no links here")))
    create_atomic(tmp_path / "claim", b"first")
    with pytest.raises(FileExistsError):
        create_atomic(tmp_path / "claim", b"second")
    assert (tmp_path / "claim").read_bytes() == b"first"
    assert names(tmp_path) == ["claim"]


def test_the_one_that_comes_second_leaves_nothing_aside_that_could_come_back(tmp_path, monkeypatch):
    def another_is_faster(aside, path):
        Path(path).write_bytes(b"first")
        raise FileExistsError

    monkeypatch.setattr(store.os, "link", another_is_faster)
    with pytest.raises(FileExistsError):
        create_atomic(tmp_path / "claim", b"second")
    assert names(tmp_path) == ["claim"]


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
    remove_at_once(tmp_path / "nothing")


def test_links_below_a_root_are_refused_and_the_root_itself_may_be_one(tmp_path):
    (tmp_path / "real/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real/inner").symlink_to(tmp_path)
    refuse_strangers(tmp_path / "link", [tmp_path / "link/below/file"])
    with raises(ConfigError, "foreign_output", "real/inner is a link"):
        refuse_strangers(tmp_path / "real", [tmp_path / "real/inner/deep/file"])


def test_names_aside_cannot_be_guessed(tmp_path):
    names = {path_aside(tmp_path / "a").name for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(r"\.a\.[0-9a-f]{32}\.tmp", name) for name in names)


@pytest.mark.parametrize("write", [
    lambda path: write_atomic(path, b"new"),
    lambda path: require_writable(path.parent),
])  # fmt: skip
def test_a_link_planted_under_a_name_aside_is_not_written_through(tmp_path, monkeypatch, write):
    """Of one who has guessed 128 bits."""
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "planted").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(store, "path_aside", lambda path: tmp_path / "planted")
    with suppress(OSError, ConfigError):
        write(tmp_path / "mine")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "mine").exists()


def test_what_killed_processes_left_aside_is_removed_and_nothing_else(tmp_path):
    for name in ("kept", ".kept.tmp", ".hidden", "below/kept"):
        write_atomic(tmp_path / name, b"")
    for name in ("mine", "others", "below/mine"):
        path_aside(tmp_path / name).touch()
    remove_asides(tmp_path, {"mine"})
    assert [name.split(".")[1] for name in names(tmp_path) if name.endswith(".tmp")] == ["kept", "others", "mine"]
    remove_asides(tmp_path)
    remove_asides(tmp_path / "below")
    assert names(tmp_path) == [".hidden", ".kept.tmp", "below", "below/kept", "kept"]


def test_a_probe_that_a_killed_process_left_is_taken_for_what_it_is(tmp_path):
    with mock.patch.object(Path, "unlink", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        require_writable(tmp_path)
    assert len(names(tmp_path)) == 1
    remove_asides(tmp_path)
    assert names(tmp_path) == []


def test_publish_directory_brings_all_files_at_once(tmp_path):
    (tmp_path / "aside/deep").mkdir(parents=True)
    (tmp_path / "aside/deep/file").write_bytes(b"x")
    publish_directory(tmp_path / "aside", tmp_path / "final")
    assert names(tmp_path) == ["final", "final/deep", "final/deep/file"]


def test_remove_tree_takes_a_link_and_not_what_it_points_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    remove_tree(tmp_path / "link")
    assert names(tmp_path) == ["real", "real/file"]


def test_remove_tree_of_nothing(tmp_path):
    remove_tree(tmp_path / "nothing")
    assert names(tmp_path) == []


def test_full_disk_is_a_fatal_error_without_leftovers(small_disk):
    disk = small_disk("64k")
    write_atomic(disk / "earlier", b"x" * 1000)
    with raises(FatalError, "disk", str(disk / "file"), os.strerror(errno.ENOSPC)) as caught:
        write_atomic(disk / "file", b"x" * 200_000)
    assert "\n" not in str(caught.value)
    assert names(disk) == ["earlier"]


def test_full_disk_does_not_harm_the_earlier_file(small_disk):
    disk = small_disk("64k")
    write_atomic(disk / "file", b"earlier")
    with raises(FatalError, "disk"):
        write_atomic(disk / "file", b"x" * 200_000)
    assert (disk / "file").read_bytes() == b"earlier"


def test_read_only_disk_is_a_fatal_error_for_a_writer(small_disk):
    disk = small_disk("64k")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with raises(FatalError, "disk", os.strerror(errno.EROFS)):
        write_atomic(disk / "file", b"x")


@pytest.mark.parametrize("name", [".", "new/folder"])
def test_read_only_disk_is_a_configuration_error_before_any_work(name, small_disk):
    disk = small_disk("64k")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with raises(ConfigError, "disk", str(disk / name), os.strerror(errno.EROFS)):
        require_writable(disk / name)


def test_require_writable_makes_the_folder_and_leaves_it_empty(tmp_path):
    require_writable(tmp_path / "new/folder")
    assert names(tmp_path) == ["new", "new/folder"]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_file_in_the_place_of_a_folder(name, tmp_path):
    (tmp_path / "file").touch()
    with raises(ConfigError, "disk", str(tmp_path / name)):
        require_writable(tmp_path / name)


def test_what_cannot_be_removed_is_a_fatal_error(small_disk):
    disk = small_disk("64k")
    for name in ("file", "folder/file"):
        write_atomic(disk / name, b"")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for name in ("file", "folder"):
        with raises(FatalError, "disk", os.strerror(errno.EROFS)):
            remove_tree(disk / name)


@pytest.mark.parametrize(
    ("error", "place"), [(OSError(errno.EIO, "", "/data/a"), "/data/a"), (OSError(errno.EIO, ""), "/data")]
)
def test_failing_disk_is_a_fatal_error_around_a_run(error, place):
    with raises(FatalError, "disk", f"{place}: ", os.strerror(errno.EIO)), disk_errors(Path("/data")):
        raise error


def test_what_no_disk_is_to_blame_for_is_left_as_it_is_around_a_run():
    with pytest.raises(FileNotFoundError), disk_errors(Path("/data")):
        raise FileNotFoundError(2, "", "/data/a")


def test_other_errors_of_the_system_are_left_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError), open_atomic(tmp_path / "file"):
        (tmp_path / "missing").read_bytes()


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_a_file_of_which_another_has_a_lease_is_waited_for(append, linked, tmp_path, monkeypatch):
    """As Linux answers those who do not wait; a FIFO is not waited for."""
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
