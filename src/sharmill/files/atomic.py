"""Files and folders that appear and disappear as a whole, and survive a power failure.

A file is written under a temporary name in the same folder, synced and renamed, so readers never see a partial file.
"""

import errno
import os
import re
import shutil
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from sharmill.errors import ConfigError
from sharmill.files.disk import stopping_errors

# Errors for a hard link that cannot be created: it would lead to another file system, links are not supported, the file
# belongs to another user, or it has too many links.
NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
# Pattern of the names that ``temp_path`` returns.
_TEMP_NAME = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")


def fsync(path: Path) -> None:
    """Make the content of a closed file, or the renames inside a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_new(path: Path) -> BinaryIO:
    """Open a new file for writing under a name that only this process writes to.

    An existing file is removed first, because it may be a symbolic link, or share its content with another file through
    a hard link.
    """
    try:
        return path.open("xb")
    except FileExistsError:
        path.unlink()
        return path.open("xb")


def write_new(path: Path, data: bytes) -> None:
    """Write ``data`` to a new file; see ``open_new``."""
    with open_new(path) as stream:
        stream.write(data)


def temp_path(path: Path) -> Path:
    """Return a temporary path in the same folder, for content that will be published as ``path``."""
    return path.with_name(f".{path.name}.{uuid4().hex}.tmp")


@contextmanager
def open_atomic(path: Path, *, parents: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file for writing, and publish it as ``path`` if no error is raised.

    With ``parents``, the folder of ``path`` is created if it is missing.
    """
    with stopping_errors(path):
        if parents:
            _make_folder(path.parent)
        temp = temp_path(path)
        try:
            with temp.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temp.replace(path)
        finally:
            temp.unlink(missing_ok=True)
        fsync(path.parent)


def write_atomic(path: Path, data: bytes, *, parents: bool = True) -> None:
    """Publish a file with the content ``data``; see ``open_atomic``."""
    with open_atomic(path, parents=parents) as stream:
        stream.write(data)


def publish_directory(temp: Path, final: Path) -> None:
    """Publish a complete directory: sync the files and folders in it, then rename it as a whole."""
    with stopping_errors(final):
        for path in (temp, *sorted(temp.rglob("*"))):
            if path.is_dir() or path.is_file():
                fsync(path)
        temp.rename(final)
        fsync(final.parent)


@contextmanager
def open_folder_atomic(path: Path) -> Iterator[Path]:
    """Create a temporary folder to be filled, and publish it as ``path`` if no error is raised."""
    temp = temp_path(path)
    with stopping_errors(path):
        try:
            temp.mkdir()
            yield temp
            publish_directory(temp, path)
        finally:
            shutil.rmtree(temp, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably."""
    with stopping_errors(path):
        _make_folder(path)


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        fsync(path.parent)


def require_writable(directory: Path) -> None:
    """Create a directory if it is missing, and raise ConfigError unless files can be written there."""
    try:
        _make_folder(directory)
        if os.access(directory, os.W_OK | os.X_OK):
            return
        problem = "it is read-only, or its owner allows nobody to write"
    except OSError as error:
        problem = os.strerror(error.errno or 0)
    raise ConfigError(f"cannot write to {directory}: {problem}; choose a writable folder", code="disk")


def remove(*paths: Path) -> None:
    """Durably remove files, and folders with their content, if they exist. Targets of links are not removed."""
    for path in paths:
        with stopping_errors(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    for folder in dict.fromkeys(path.parent for path in paths):
        if folder.is_dir():
            fsync(folder)


def remove_if_empty(*folders: Path) -> None:
    """Remove the folders that exist and are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def remove_at_once(folder: Path) -> None:
    """Rename a folder out of the way, then delete it, so that concurrent users never see it half deleted.

    After this returns, no process can rename a file out of the folder. Anything that a killed process left behind while
    removing the same folder is deleted too.
    """
    temp = temp_path(folder)
    with stopping_errors(folder):
        with suppress(FileNotFoundError):
            folder.rename(temp)
            fsync(folder.parent)
        # Try again, since another process may still be creating files in the folder.
        for _ in range(10):
            shutil.rmtree(temp, ignore_errors=True)
            if not temp.exists():
                break
        # Other processes may be removing the same files.
        with suppress(FileNotFoundError):
            remove_temp_files(folder.parent, {folder.name})


def remove_temp_files(folder: Path, names: Container[str] | None = None) -> None:
    """Remove temporary files of killed processes from a folder (not recursively).

    Only a process that publishes files in the folder may call this. If other processes publish there too, it must pass
    the ``names`` of its own files.
    """
    for path in folder.glob(".*.tmp"):
        match = _TEMP_NAME.fullmatch(path.name)
        if match and (names is None or match[1] in names):
            remove(path)
