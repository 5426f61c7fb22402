"""Checks of owners, links and permissions of files and folders that a process relies on.

``require_trusted_owner`` checks paths below a directory that the user named; ``require_private`` checks a folder whose
files decide which code this process runs.
"""

import os
import stat
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path, PurePath

from sharmill.errors import ConfigError, refuse
from sharmill.files.atomic import make_folder
from sharmill.files.disk import stopping_errors


@lru_cache(maxsize=1024)
def anybody_may_write_to(folder: Path) -> bool:
    """Return True if anybody may write to a folder; the first result in this process is cached."""
    return bool(folder.stat().st_mode & stat.S_IWOTH)


def owned_by_other_user(status: os.stat_result, folder: Path) -> bool:
    """Return True if a file or folder belongs to another user who is not trusted to write to its parent folder.

    The owner of the parent folder and users who may write to it through its group are trusted, so that several users
    can work on one run. If only this user may write to the parent folder, another user's file in it is trusted too,
    since this user must have let others write when it was created. Another user's folder is not trusted, since its
    owner can still add links to it.

    Args:
        status: status of the file or folder.
        folder: its parent folder.
    """
    if status.st_uid in (os.geteuid(), 0):
        return False
    above = folder.stat()
    is_let_in = above.st_uid != os.geteuid() or bool(above.st_mode & stat.S_IWGRP) or not stat.S_ISDIR(status.st_mode)
    return status.st_uid != above.st_uid and (bool(above.st_mode & stat.S_IWOTH) or not is_let_in)


def require_trusted_owner(root: Path, paths: Iterable[Path], *, may_be_link: Path | None = None) -> None:
    """Raise ConfigError if a path below ``root``, or a folder on the way to it, is a link or has an untrusted owner.

    FIFOs, sockets and devices are rejected too.

    Args:
        may_be_link: a path that is allowed to be a link.
    """
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
            refuse(
                (
                    stat.S_ISLNK(status.st_mode) and part != may_be_link,
                    f"{part} is a link, and links inside {root} are not followed: replace it by its target, "
                    "or make the whole directory a link",
                ),
                (
                    owned_by_other_user(status, part.parent),
                    f"{part} belongs to another user: {part.parent} does not let its group write, or lets anybody "
                    "write (chmod o-w); inspect what is there, then remove it or change its owner (chown)",
                ),
                (
                    stat.S_IFMT(status.st_mode) not in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK),
                    f"{part} is neither a file nor a folder; remove it",
                ),
                code="foreign_output",
            )


def require_private(folder: Path) -> None:
    """Raise ConfigError unless a folder and its files belong to this user, and nobody else can add files.

    The files decide which code this process runs, since a configuration may name code of other packages.
    """
    for path in (folder, *folder.parents):
        status = path.lstat()
        writers = stat.S_IWGRP | stat.S_IWOTH
        is_shared, owners = bool(status.st_mode & writers), {os.geteuid()}
        if path != folder:
            is_shared, owners = _is_shared(status, writers), {os.geteuid(), 0}
        if is_shared or status.st_uid not in owners:
            raise ConfigError(
                f"{folder} is not private: another user owns {path} or may write to it; run chown or chmod go-w on it",
                code="foreign_output",
            )
    for path in folder.iterdir():
        status = path.lstat()
        if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode):
            raise ConfigError(
                f"{path} is a link or belongs to another user; remove it from {folder}", code="foreign_output"
            )


def make_private_folder(path: Path) -> None:
    """Create a folder that only its owner can access, or restrict an existing one.

    It may contain files to be unpickled, so nobody else may add files or replace the folder.

    Raises:
        ConfigError: the path is a link or belongs to another user, or anybody may write to a folder above it.
    """
    make_folder(path.parent)
    require_trusted_owner(path.parent, [path])
    with stopping_errors(path):
        path.mkdir(mode=0o700, exist_ok=True)
        is_own = path.stat().st_uid == os.geteuid()
        shared = [str(one) for one in path.absolute().parents if _is_shared(one.stat(), stat.S_IWOTH)]
        refuse(
            (not is_own, f"{path} belongs to another user; choose another run_dir, or remove it if it is not needed"),
            (shared, f"anybody may write to {', '.join(shared)}; remove that permission (chmod o-w)"),
            code="foreign_output",
        )
        path.chmod(0o700)


def _is_shared(status: os.stat_result, writers: int) -> bool:
    """Return True if a permission in the set ``writers`` allows users to replace any file in a folder.

    In a folder with the sticky bit, such as /tmp, users can replace only their own files.
    """
    return bool(status.st_mode & writers) and not status.st_mode & stat.S_ISVTX


def check_name(name: str) -> None:
    """Raise ValueError unless a file name read from a run directory stays below its folder."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or not name.isprintable():
        raise ValueError(f"{name!r} is not a relative path without '..'")
