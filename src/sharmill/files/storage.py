"""Writes of files that others may read: aside first, fsync, then rename, so that no reader sees a partial file.

Local paths only. Ranks rename their progress records by themselves, without fsync, since they are only looked at; the
demo publishes its corpus in the same way.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

import xxhash

from sharmill.errors import ConfigError, DeviceError, FatalError

# What ``path_aside`` calls a file until it is published.
_ASIDE = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")
PROBE = "probe"
_REMOVALS = 10
# Errors that the next unit would meet as well: going on would only fail every unit in turn.
STOPPING_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})
# On NFS, of a file that another node has replaced, and of a folder with a file in it that is removed but still open.
_MOVING_ERRNOS = frozenset({errno.ESTALE, errno.EBUSY, errno.ENOTEMPTY})
# Those that only writing can meet: where a stage reads and writes, the others may concern one input file.
WRITE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# Of hard links: another file system, one without them, a file of somebody else's, or one that has all it may have.
NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


@contextmanager
def stopping_errors(path: Path, errnos: frozenset[int] = STOPPING_ERRNOS, *, host: str = "") -> Iterator[None]:
    """Turn a full disk, a read-only folder and the like into a FatalError that names ``path``.

    Where the disk is that of one host alone, which is named then, it is a DeviceError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in errnos:
            message = (
                f"cannot write {path}{f' on {host}' if host else ''}: {os.strerror(error.errno)}; "
                "make room or permit writing there, then run the same command again"
            )
            if host:
                raise DeviceError(message, place=host, code="disk") from error
            raise FatalError(message, code="disk") from error
        raise


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn what a failing disk does to anything else, reading included, into a FatalError: around a whole run."""
    try:
        yield
    except OSError as error:
        if error.errno in STOPPING_ERRNOS | _MOVING_ERRNOS:
            place = error.filename or f"a file of {folder}"
            remedy = "see to the disk, then" if error.errno in STOPPING_ERRNOS else "another process was faster:"
            raise FatalError(
                f"cannot read or write {place}: {os.strerror(error.errno)}; {remedy} run the same command again",
                code="disk",
            ) from error
        raise


class NotRegularError(ValueError):
    """A folder, a FIFO, a socket or a device in the place of a file."""

    def __init__(self) -> None:
        super().__init__("it is not a regular file")


def open_regular(
    path: str | os.PathLike[str], *, follow_links: bool = True, append: bool = False, buffering: int = -1
) -> BinaryIO:
    """Open a regular file, without waiting for a writer where it is a FIFO instead.

    Args:
        append: open it for writing at its end, and make it where it is not there; else it is read.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not a regular file, or a link that is not to be followed, or its name cannot be one.
    """
    flags = os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND if append else os.O_RDONLY
    try:
        try:
            descriptor = os.open(path, flags, 0o666)
        except BlockingIOError:
            if not stat.S_ISREG(Path(path).stat(follow_symlinks=follow_links).st_mode):
                raise
            # Another process has a lease of it, or an NFS client a delegation: it is given back to one that waits.
            descriptor = os.open(path, flags & ~os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a link" if Path(path).is_symlink() else "links lead in a circle") from error
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"it cannot be opened: {error.strerror}") from error
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, or a device that is not there
            raise NotRegularError from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError
    return cast("BinaryIO", os.fdopen(descriptor, "ab" if append else "rb", buffering))


def open_stored(path: Path, *, append: bool = False, buffering: int = -1) -> BinaryIO:
    """Open a file of a run directory: one that sharmill wrote, and that others may have replaced since.

    Args:
        append: open it for writing at its end, and make it where it is not there; else it is read.

    Raises:
        FileNotFoundError: it is not there.
        ConfigError: it is a link, not a regular file, or a stranger's.
    """
    try:
        stream = open_regular(path, follow_links=False, append=append, buffering=buffering)
        if is_strangers(os.fstat(stream.fileno()), path.parent):
            stream.close()
            raise ValueError("it belongs to another user, and anybody may write to its folder")
    except ValueError as error:
        raise damaged_file(path, str(error)) from error
    return stream


def damaged_file(path: Path, what: str) -> ConfigError:
    """Return the error of a file of a run directory that does not hold what sharmill writes there."""
    return ConfigError(
        f"{path} is damaged or not sharmill's: {what}; begin this stage anew with --restart, or restore the file",
        code="damaged_run_dir",
    )


def is_strangers(status: os.stat_result, folder: Path) -> bool:
    """Return True if a thing in a folder belongs to another user whom nobody has let in: anybody may write there.

    Who may write to a folder by its group is trusted, so that several users can work on one run.
    """
    if status.st_uid in (os.geteuid(), 0):
        return False
    above = folder.stat()
    return status.st_uid != above.st_uid and bool(above.st_mode & stat.S_IWOTH)


def checksum(path: Path) -> str:
    """xxh3-64 of the bytes of a regular file, in hexadecimal; raises as ``open_regular``."""
    with open_regular(path, buffering=0) as stream:
        return checksum_stream(stream)


def checksum_stream(stream: BinaryIO) -> str:
    """xxh3-64 of what is left of a stream, in hexadecimal."""
    return hashlib.file_digest(cast("Any", stream), xxhash.xxh3_64).hexdigest()


def checksum_bytes(data: bytes) -> str:
    """xxh3-64 of ``data``, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def fsync_directory(path: Path) -> None:
    """Make the renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the contents of a closed file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def path_aside(path: Path) -> Path:
    """Return the path at which to write what will be published as ``path``: beside it, under a name of its own."""
    return path.with_name(f".{path.name}.{uuid4().hex}.tmp")


@contextmanager
def open_atomic(path: Path, *, parents: bool = True) -> Iterator[BinaryIO]:
    """Open a file beside ``path`` for writing and publish it under that name if no error is raised.

    ``parents`` makes the folder where it is missing.
    """
    with stopping_errors(path):
        if parents:
            _make_folder(path.parent)
        aside = path_aside(path)
        try:
            with aside.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        fsync_directory(path.parent)


def write_atomic(path: Path, data: bytes, *, parents: bool = True) -> None:
    """Publish ``data`` as ``path``."""
    with open_atomic(path, parents=parents) as stream:
        stream.write(data)


def create_atomic(path: Path, data: bytes) -> None:
    """Publish ``data`` as ``path`` unless there is such a file; where no links can be made, a half may be seen.

    Raises:
        FileExistsError: there is one; of several processes that try, one succeeds.
    """
    with stopping_errors(path):
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        aside = path_aside(path)
        try:
            _create(aside, data)
            try:
                os.link(aside, path)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                _create(path, data)
        finally:
            aside.unlink(missing_ok=True)
            # Also where another process was faster: what is aside would come back, and nobody looks for it there.
            fsync_directory(path.parent)


def _create(path: Path, data: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def publish_directory(aside: Path, final: Path) -> None:
    """Publish a complete directory: sync the files and folders in it, then rename it as a whole."""
    with stopping_errors(final):
        for path in (aside, *sorted(aside.rglob("*"))):
            if path.is_dir():
                fsync_directory(path)
            elif path.is_file():
                fsync_file(path)
        aside.rename(final)
        fsync_directory(final.parent)


def remove_at_once(folder: Path) -> None:
    """Remove a folder in which others may be at work: by a rename first, after which nobody finds it any more.

    When this returns, nothing that was in it can be renamed out of it either.
    """
    aside = path_aside(folder)
    with stopping_errors(folder):
        try:
            folder.rename(aside)
        except FileNotFoundError:
            return
        fsync_directory(folder.parent)
        # Another process may be making a file in it at this moment.
        for _ in range(_REMOVALS):
            shutil.rmtree(aside, ignore_errors=True)
            if not aside.exists():
                return
        shutil.rmtree(aside)


def make_folder(path: Path) -> None:
    """Make a folder, with its parents, so that it outlasts a loss of power."""
    with stopping_errors(path):
        _make_folder(path)


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner may look into; one that is there becomes so, if it is this user's.

    Raises:
        ConfigError: it is a link, or belongs to a stranger.
    """
    make_folder(path.parent)
    refuse_strangers(path.parent, [path])
    with stopping_errors(path):
        path.mkdir(mode=0o700, exist_ok=True)
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o700)


def remove_if_empty(*folders: Path) -> None:
    """Remove those of the folders that are there and have nothing in them."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def require_private(folder: Path) -> None:
    """Raise ConfigError unless a folder and what lies in it belong to this user, and nobody else can put things there.

    What is read there decides what this process does: a configuration may name code of other packages.
    """
    for path in (folder, *folder.parents):
        status = path.lstat()
        is_shared = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        owners = {os.geteuid()}
        if path != folder:
            owners.add(0)
            # In a folder like /tmp others cannot replace what is not theirs.
            is_shared = is_shared and not status.st_mode & stat.S_ISVTX
        if is_shared or status.st_uid not in owners:
            raise ConfigError(
                f"{folder} is not for this user alone: others may write to {path}, or it is theirs (chmod go-w, chown)",
                code="foreign_output",
            )
    for path in folder.iterdir():
        status = path.lstat()
        if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode):
            raise ConfigError(f"{path} is a link or another user's: {folder} is not worked on", code="foreign_output")


def refuse_strangers(root: Path, paths: Iterable[Path]) -> None:
    """Raise ConfigError if a path below ``root``, or a folder on the way to it, is a link or a stranger's."""
    seen: set[Path] = set()
    for path in paths:
        for part in (path, *path.parents):
            if part == root or part in seen or not part.is_relative_to(root):
                break
            seen.add(part)
            try:
                status = part.lstat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            if stat.S_ISLNK(status.st_mode):
                raise ConfigError(
                    f"{part} is a link, and links inside {root} are not followed: put what it leads to there itself, "
                    "or let the directory as a whole be a link",
                    code="foreign_output",
                )
            if is_strangers(status, part.parent):
                raise ConfigError(
                    f"{part} belongs to another user, and anybody may write to {part.parent}: take away that "
                    "permission (chmod o-w), look at what is there, and remove it or make it yours (chown)",
                    code="foreign_output",
                )


def remove_asides(folder: Path, names: Container[str] | None = None) -> None:
    """Remove what killed processes left in a folder, not in those below it, of files that were to be published there.

    Only for the one process that may publish there; where others publish files too, ``names`` are its own.
    """
    for path in folder.glob(".*.tmp"):
        match = _ASIDE.fullmatch(path.name)
        if match and (names is None or match[1] in names):
            remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a file or a directory with all that is in it, if it exists."""
    with stopping_errors(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_for_good(paths: Iterable[Path]) -> None:
    """Remove files and directories as ``remove_tree`` does, so that no loss of power brings them back."""
    removed = list(paths)
    for path in removed:
        remove_tree(path)
    for folder in sorted({path.parent for path in removed}):
        if folder.is_dir():
            fsync_directory(folder)


def is_probe(path: Path) -> bool:
    """Return True for what ``require_writable`` leaves where its process is killed."""
    match = _ASIDE.fullmatch(path.name)
    return match is not None and match[1] == PROBE


def require_writable(directory: Path) -> None:
    """Create ``directory`` if needed and prove that files can be written there.

    Raises:
        ConfigError: it cannot be created or written to.
    """
    probe = path_aside(directory / PROBE)
    try:
        _make_folder(directory)
        probe.touch(exist_ok=False)
        # Another process that begins its work here may have taken it for a leftover.
        probe.unlink(missing_ok=True)
    except OSError as error:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write to {directory}: {error.strerror}; choose a folder that you may write to",
            code="disk",
        ) from error


def time_of_folder(folder: Path) -> float:
    """Return the time of the file system that a folder is on, in Unix seconds, as it stands at files written now.

    Nodes' clocks may be minutes apart. Where this user cannot write there, it is the time of this machine. On NFS this
    also brings the node's view of the names in the folder up to date, since it makes a file there.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\n")
            probe.flush()
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()
