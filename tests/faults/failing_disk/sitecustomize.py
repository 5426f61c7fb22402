"""A failing disk: in a Python process with this folder on its path, some changes below another folder fail.

An operation is an open for writing, a write, fsync, rename, mkdir, unlink or rmdir below ``FAULTY_DISK_FOLDER``; for
the kinds ``unreadable`` and ``stale``, it is a read of a file instead. From operation ``FAULTY_DISK_AT`` on, counted
from 1, the fault ``FAULTY_DISK_KIND`` happens, with the error ``FAULTY_DISK_ERRNO``:

- ``none``: nothing; operations are only counted.
- ``glitch``, ``fsync``, ``stale``: one operation, fsync or read fails, and later ones succeed.
- ``dead``, ``readonly``, ``unreadable``: every operation fails.
- ``full``, ``quota``: every operation that needs space fails.
- ``kill``: the process is killed instead of doing the operation.

Operations of all processes are counted by the size of the file ``FAULTY_DISK_COUNT``. ``FAULTY_DISK_LOG`` gets a line
with number, name and path for each failed operation, or for every operation if the kind is ``none``. Reads and writes
of C libraries are not seen.
"""

import builtins
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_FOLDER, _KIND, _AT, _ERRNO, _COUNT, _LOG = (
    os.environ[f"FAULTY_DISK_{name}"] for name in ("FOLDER", "KIND", "AT", "ERRNO", "COUNT", "LOG")
)
_FAILED = f"{_COUNT}.failed"
_OWN = (_COUNT, _FAILED, _LOG)
_ONCE = ("glitch", "fsync", "stale", "kill")
_NEED_ROOM = ("create", "write", "mkdir")
# For each audit event about names, the positions of the path and of the folder to which the path is relative.
_NAMES = {"os.rename": (1, 3), "os.mkdir": (0, 2), "os.remove": (0, 1), "os.rmdir": (0, 1)}


def _meet(name: str, path: str, *, is_named: bool = False) -> None:
    """Count an operation, and raise its error if it is to fail."""
    if not path.startswith(_FOLDER) or path in _OWN or (name == "read") != (_KIND in ("unreadable", "stale")):
        return
    number = _append(_COUNT, b".")
    fails = number >= int(_AT) and _KIND != "none"
    fails = fails and (_KIND != "fsync" or name == "fsync")
    fails = fails and (_KIND not in ("full", "quota") or name in _NEED_ROOM)
    # Faults that happen once happen only in the first of all processes.
    fails = fails and (_KIND not in _ONCE or _append(_FAILED, b".") == 1)
    if fails or _KIND == "none":
        _append(_LOG, f"{number} {name.replace('create', 'open')} {path}\n".encode())
    if fails and _KIND == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fails:
        raise OSError(int(_ERRNO), os.strerror(int(_ERRNO)), path if is_named else None)


def _append(path: str, data: bytes) -> int:
    """Append to a file, and return its new length."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    _WRITE(descriptor, data)
    size = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.close(descriptor)
    return size


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    """Handle an audit event about a name as an operation."""
    if event == "open":
        path, _, flags = arguments
        if not isinstance(path, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _meet("create" if flags & os.O_CREAT else "open", _absolute(path), is_named=True)
    elif event in _NAMES:
        path, folder = (arguments[place] for place in _NAMES[event])
        # Creating an existing folder changes nothing on the disk.
        if event != "os.mkdir" or not os.path.isdir(_absolute(path, folder)):  # noqa: PTH112
            _meet(event.removeprefix("os."), _absolute(path, folder), is_named=True)


def _absolute(path: Any, folder: int = -1) -> str:
    return os.path.join(_path_of(folder) if folder >= 0 else os.getcwd(), os.fsdecode(path))  # noqa: PTH109, PTH118


def _path_of(file: Any) -> str:
    descriptor = file if isinstance(file, int) else file.fileno()
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115


def _meeting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function or method of an open file, wrapped as an operation."""

    def call(file: Any, *arguments: Any) -> Any:
        _meet(name, _path_of(file))
        return function(file, *arguments)

    return call


class _File(io.FileIO):
    write = _meeting("write", io.FileIO.write)
    read = _meeting("read", io.FileIO.read)
    readall = _meeting("read", io.FileIO.readall)
    readinto = _meeting("read", io.FileIO.readinto)


def _open(
    file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
    newline: str | None = None, closefd: bool = True, opener: Any = None,
) -> Any:  # fmt: skip
    """Open a file like ``open``, with reads and writes as operations."""
    raw = _File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
    if buffering == 0:
        return raw
    kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
    stream = kind(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
    return stream if "b" in mode else io.TextIOWrapper(stream, encoding, errors, newline, buffering == 1)


_WRITE = os.write
sys.addaudithook(_see)
os.write = _meeting("write", os.write)
os.pwrite = _meeting("write", os.pwrite)
os.read = _meeting("read", os.read)
os.fsync = _meeting("fsync", os.fsync)
io.open = builtins.open = _open
