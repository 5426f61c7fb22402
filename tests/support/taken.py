"""Links, FIFOs and files of other users that take the names of sharmill's output files."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

# Each puts something in the place of a name; elsewhere there are a file and a folder, such as were there.
TAKERS: dict[str, Callable[[Path, Path], object]] = {
    "a link to a file": lambda path, elsewhere: path.symlink_to(elsewhere / "file"),
    "a link to a folder": lambda path, elsewhere: path.symlink_to(elsewhere / "folder"),
    "a link to nothing": lambda path, elsewhere: path.symlink_to(elsewhere / "new"),
    "a hard link": lambda path, elsewhere: os.link(elsewhere / "file", path),
    "a FIFO": lambda path, elsewhere: os.mkfifo(path),
    "a folder of another user's": lambda path, elsewhere: (path.mkdir(), os.chown(path, 12345, -1)),
    "a file of another user's": lambda path, elsewhere: (
        shutil.copyfile(elsewhere / "file", path), os.chown(path, 12345, -1),
    ),
}  # fmt: skip


def state_of(folder: Path) -> dict[str, tuple[object, ...]]:
    """Return the mode, owner, time and bytes of the files of a folder."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = (status.st_mode, status.st_uid, status.st_mtime_ns, content)
    return found


def take(path: Path, kind: str, elsewhere: Path) -> None:
    """Put an object of a kind in place of a name, with its target elsewhere."""
    (elsewhere / "folder").mkdir(parents=True)
    (elsewhere / "folder/file").write_text("mine")
    if path.is_dir():
        shutil.copytree(path, elsewhere / "folder", dirs_exist_ok=True)
        shutil.rmtree(path)
    elif path.exists():
        path.rename(elsewhere / "file")
    if not (elsewhere / "file").exists():
        (elsewhere / "file").write_text("mine")
    path.parent.mkdir(parents=True, exist_ok=True)
    TAKERS[kind](path, elsewhere)
