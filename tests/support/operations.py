"""Counting of what a program asks of a file system, by tracing its system calls with strace."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

# What a shared file system has to be asked for. Reads, writes and closes are none of it, nor is the status of an open
# file: that has come with the answer to its opening.
_CALLS = "%file,fsync,fdatasync,flock,getdents64,ftruncate,fchmod"
_MARK = "/sharmill-mark/"
_CALL = re.compile(r"(?:\[pid +\d+\] )?(\w+)\((.*)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OPEN_FILE = re.compile(r"^\d+<([^>]*)>")
_NAMES = {
    "openat": "open", "newfstatat": "stat", "access": "stat", "faccessat": "stat", "faccessat2": "stat",
    "statx": "stat", "lstat": "stat", "getdents64": "list", "mkdirat": "mkdir", "unlinkat": "unlink",
    "renameat": "rename", "renameat2": "rename", "readlinkat": "readlink", "linkat": "link", "fdatasync": "fsync",
    "utimensat": "touch", "fchmod": "chmod", "fchmodat": "chmod", "ftruncate": "truncate",
}  # fmt: skip


def mark(phase: str) -> None:
    """Tells the trace that what follows belongs to a phase; an empty one is not counted."""
    with suppress(OSError):
        Path(f"{_MARK}{phase}").stat()


@cache
def why_not() -> str:
    """Return why nothing can be traced here, or nothing."""
    try:
        done = subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no strace"
    return f"strace cannot trace: {done.stderr.strip()}" if done.returncode else ""


def trace(
    arguments: Sequence[object], log: Path, roots: Mapping[str, Path], environment: Mapping[str, str] | None = None
) -> dict[str, Counter[tuple[str, str]]]:
    """Runs Python with these arguments; returns how often what was asked of which file, by phase.

    Args:
        roots: the folders whose files count, by the names that they get.
    """
    strace = ["strace", "-f", "-y", "--seccomp-bpf", "-e", f"trace={_CALLS}", "-e", "signal=none", "-o", log]
    subprocess.run([*map(str, (*strace, sys.executable, *arguments))], check=True, env=environment)
    with log.open() as lines:
        return count(lines, roots)


def count(lines: Iterable[str], roots: Mapping[str, Path]) -> dict[str, Counter[tuple[str, str]]]:
    """Return what the lines of a trace ask for: by phase, operation and path."""
    found: dict[str, Counter[tuple[str, str]]] = {}
    phase = ""
    for line in lines:
        # The number of the process comes first.
        match = _CALL.match(line.partition(" ")[2].lstrip())
        if match is None:
            continue
        name, rest = match[1], match[2]
        path = _path_of(rest)
        if path.startswith(_MARK):
            phase = path.removeprefix(_MARK)
        elif phase and not _is_of_open_file(name, rest):
            for root, folder in roots.items():
                if path == str(folder) or path.startswith(f"{folder}/"):
                    inside = f"{root}{path.removeprefix(str(folder))}"
                    found.setdefault(phase, Counter())[_operation(name, rest), inside] += 1
    return found


def _operation(name: str, rest: str) -> str:
    if name == "openat" and "O_CREAT" in rest:
        return "create"
    if name == "unlinkat" and "AT_REMOVEDIR" in rest:
        return "rmdir"
    return _NAMES.get(name, name)


def _is_of_open_file(name: str, rest: str) -> bool:
    quoted = _QUOTED.search(rest)
    # Of a call that another thread interrupted, only what comes before its answer is there.
    return name == "newfstatat" and (quoted is None or not quoted[1])


def _path_of(rest: str) -> str:
    """Return the first path of a call: absolute, relative to an open folder, or that of an open file."""
    folder = _OPEN_FILE.match(rest.removeprefix("AT_FDCWD").lstrip())
    quoted = _QUOTED.search(rest)
    text = quoted[1] if quoted else ""
    if text.startswith("/") or folder is None:
        return text
    return f"{folder[1]}/{text}" if text else folder[1]


def kind_of(path: str) -> str:
    """Return a path without what differs from run to run and from unit to unit."""
    path = re.sub(r"(rank-[^/]*-)?[0-9a-f]{32}", "*", path)
    path = re.sub(r"\b[0-9a-f]{16}\b", "TOKEN", path)
    return re.sub(r"\b\d{6}\b(-[^/]*)?", "N", path)
