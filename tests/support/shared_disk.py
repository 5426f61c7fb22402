"""Simulated hosts on a real folder that each of them sees as NFS shows it, and their processes in lockstep.

One thread runs at a time: it goes on until it touches the folder, sleeps or waits, which takes a time that is drawn. So
a seed and the faults fix the whole course. A host sees names that another has made, and files that another has put in
the place of one, up to ``late`` seconds late, and keeps attributes of files and folders for as long; a file that it
opens has all its bytes, and what it makes, renames or removes is decided at once.
"""

from __future__ import annotations

import builtins
import errno
import io
import math
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

# How long a step takes is at most one of these.
_STEP_SECONDS = (0.001, 0.01, 0.1, 1.0)

_NAMES = (
    "open", "mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "listdir", "scandir", "stat", "lstat",
)  # fmt: skip


class Killed(BaseException):
    """The end of a thread on a host that is gone: no step of it has any effect any more."""


@dataclass(frozen=True)
class Fault:
    """Something that befalls a host before its n-th change in a folder.

    Args:
        folder: the name of the folder.
        seconds: so long the thread stands still, or the whole host; the host is gone for ever if infinite.
    """

    folder: str
    nth: int
    seconds: float
    whole: bool = True


@dataclass(eq=False)
class Host:
    """A machine. ``ahead`` is what its clock is ahead of others, ``good_for`` how many attempts it does well."""

    name: str
    ahead: float = 0.0
    faults: tuple[Fault, ...] = ()
    good_for: float = math.inf
    frozen_until: float = 0.0
    changes: Counter[str] = field(default_factory=Counter)
    attributes: dict[tuple[str, bool], tuple[float, os.stat_result]] = field(default_factory=dict)


class _Version:
    """A file or folder that a name stands for since a time; ``copy`` holds the bytes of one that was replaced."""

    def __init__(self, since: float, maker: Host | None) -> None:
        self.since = since
        self.maker = maker
        self.copy: str | None = None
        self.delays: dict[Host, float] = {}


def _closed_lock() -> threading.Lock:
    """Return a lock that another thread is to open, which is faster than a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Task:
    """A thread of a host; ``wake`` is when it goes on."""

    def __init__(self, host: Host, wake: float, target: Callable[[], object], control: threading.Lock) -> None:
        self.host = host
        self.wake = wake
        self.is_done = False
        self.error: BaseException | None = None
        self.turn = _closed_lock()
        self.thread = threading.Thread(target=self._run, args=(target, control), daemon=True)

    def _run(self, target: Callable[[], object], control: threading.Lock) -> None:
        self.turn.acquire()
        try:
            target()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread of the test
            self.error = error
        self.is_done = True
        control.release()

    @property
    def due(self) -> float:
        return max(self.wake, self.host.frozen_until)


class SharedDisk:
    """The simulation, as a context in which the functions of ``os``, ``io`` and ``time`` are those of its hosts.

    Args:
        root: the folder that all hosts share.
        late: the most seconds until a host sees what another has done.
        aside: an empty folder on the same file system.
    """

    running: SharedDisk

    def __init__(self, root: Path, aside: Path, seed: int, late: float) -> None:
        self.now = 0.0
        self._end = math.inf
        self.tasks: list[_Task] = []
        self._root = f"{root}{os.sep}"
        self._aside = aside
        self._random = Random(seed)
        self._late = late
        self._names: dict[str, list[_Version]] = {}
        self._moved: list[tuple[str, str, _Version]] = []
        self._numbers = count()
        self._control = _closed_lock()
        self._current: _Task | None = None
        self._real = SimpleNamespace(**vars(os), io_open=io.open)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> SharedDisk:
        SharedDisk.running = self
        real_time = SimpleNamespace(**vars(time))
        for name in _NAMES:
            self._patch.setattr(os, name, self._covering(getattr(os, name), getattr(self, f"_{name}")))
        self._patch.setattr(os, "stat", self._covering(os.stat, self._stat))
        self._patch.setattr(
            os, "lstat", self._covering(os.lstat, lambda path, **_: self._stat(path, follow_symlinks=False))
        )
        for module in (io, builtins):
            self._patch.setattr(module, "open", self._covering(io.open, self._io_open))
        self._patch.setattr(os, "urandom", self._random.randbytes)
        self._patch.setattr(os, "fsync", lambda file: self.sleep(self._step()) if self.task else None)
        for name, clock in (("monotonic", real_time.monotonic), ("time", real_time.time)):
            self._patch.setattr(time, name, lambda clock=clock: self.clock() if self.task else clock())
        self._patch.setattr(time, "sleep", lambda seconds: (self.sleep if self.task else real_time.sleep)(seconds))
        threads = SimpleNamespace(Thread=self._thread, Event=lambda: _Event(self))
        self._patch.setattr("sharmill.engine.progress.threading", threads)
        return self

    def __exit__(self, *exception: object) -> None:
        for task in self.tasks:
            task.host.frozen_until = math.inf
            while not task.is_done:
                self._resume(task)
        self._patch.undo()

    @property
    def task(self) -> _Task | None:
        """The task that this thread is, None where it is none."""
        task = self._current
        return task if task is not None and task.thread is threading.current_thread() else None

    @property
    def host(self) -> Host:
        """The host of the thread that calls."""
        assert self._current is not None
        return self._current.host

    def clock(self) -> float:
        assert self._current is not None
        return 1e9 + self.now + self._current.host.ahead

    def start(self, host: Host, target: Callable[[], object], delay: float = 0.0) -> _Task:
        """Add a thread of a host."""
        self.tasks.append(_Task(host, self.now + delay, target, self._control))
        self.tasks[-1].thread.start()
        return self.tasks[-1]

    def run(self, most_seconds: float, after_step: Callable[[], object] = lambda: None) -> None:
        """Run all threads to their ends, which must come within so many seconds of simulated time."""
        self._end = most_seconds
        while True:
            live = [task for task in self.tasks if not task.is_done and task.host.frozen_until < math.inf]
            if not live:
                return
            task = min(live, key=lambda task: task.due)
            self.now = max(self.now, task.due)
            assert self.now < self._end, "the stage does not end"
            self._resume(task)
            if task.error is not None:
                raise task.error
            after_step()

    def sleep(self, seconds: float) -> None:
        """Let other threads go on for so long."""
        task = self._current
        assert task is not None
        task.wake = self.now + seconds
        others = (other.due for other in self.tasks if other is not task and not other.is_done)
        if task.due < min(self._end, *others, math.inf):
            self.now = max(self.now, task.due)  # it is the next again
        elif task.host.frozen_until < math.inf:
            self._control.release()
            task.turn.acquire()
        if task.host.frozen_until == math.inf:
            raise Killed

    def _resume(self, task: _Task) -> None:
        self._current = task
        task.turn.release()
        self._control.acquire()
        self._current = None

    def _thread(self, target: Callable[[], object], **_: Any) -> Any:
        assert self._current is not None
        host = self._current.host
        started: list[_Task] = []

        def join() -> None:
            while not started[0].is_done:
                self.sleep(self._step())

        return SimpleNamespace(start=lambda: started.append(self.start(host, target)), join=join)

    def _step(self) -> float:
        return self._random.choice(_STEP_SECONDS) * self._random.random()

    def _covering(self, real: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is ``own`` for tasks, on paths of the folder, and ``real`` for all else."""

        def call(path: Any = ".", *args: Any, **options: Any) -> Any:
            name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            if self.task is None or options.get("dir_fd") is not None or not name.startswith(self._root):
                return real(path, *args, **options)
            options.pop("dir_fd", None)
            return own(self._follow(name), *args, **options)

        return call

    def _follow(self, path: str) -> str:
        """Return where a path leads on this host, which finds a folder that another has renamed for a while yet."""
        for old, new, version in self._moved:
            if (path + os.sep).startswith(old + os.sep) and not self._is_seen(version):
                path = new + path[len(old) :]
        return path

    def _is_seen(self, version: _Version) -> bool:
        assert self._current is not None
        host = self._current.host
        if host is version.maker:
            return True
        if host not in version.delays:
            version.delays[host] = self._random.choice((0.0, 0.0, self._late * self._random.random()))
        return version.since + version.delays[host] <= self.now

    def _find(self, path: str) -> str:
        """Return where the bytes are that this host finds by a name."""
        end = len(self._root)
        while end >= 0:
            end = path.find(os.sep, end + 1)
            if versions := self._names.get(path if end < 0 else path[:end]):
                seen = next((version for version in reversed(versions) if self._is_seen(version)), None)
                if seen is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return (seen.copy if versions and seen else None) or path

    def _change(self, path: str) -> Host:
        """Take the time of a change, before which something may befall the host."""
        assert self._current is not None
        host = self._current.host
        folder = Path(path).parent.name
        seconds = self._step()
        for fault in host.faults:
            if (fault.folder, fault.nth) == (folder, host.changes[folder]):
                seconds += fault.seconds
                if fault.whole or fault.seconds == math.inf:
                    host.frozen_until = self.now + fault.seconds
        host.changes[folder] += 1
        self.sleep(seconds)
        parent = path.rpartition(os.sep)[0]
        self._find(parent)
        _forget(host, path, parent)
        return host

    def kind(self, path: str | os.PathLike[str]) -> int:
        """Return the mode of what is at a path in truth, 0 where nothing is."""
        with suppress(FileNotFoundError):
            return self._real.lstat(path).st_mode
        return 0

    def _make(self, path: str, make: Callable[[], Any]) -> Any:
        host = self._change(path)
        is_new = self.kind(path) == 0
        try:
            made = make()
        except FileExistsError:
            self._names.pop(path, None)  # the answer of the server is kept
            raise
        if is_new:
            self._names[path] = [_Version(self.now, host)]
        return made

    def _open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            return self._make(path, lambda: self._real.open(path, flags, mode))
        self.sleep(self._step())
        return self._real.open(self._find(path), flags, mode)

    def _io_open(self, path: str, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode.startswith("r"):
            self.sleep(self._step())
            return self._real.io_open(self._find(path), mode, *args, **options)
        return self._make(path, lambda: self._real.io_open(path, mode, *args, **options))

    def _mkdir(self, path: str, *args: Any, **options: Any) -> None:
        self._make(path, lambda: self._real.mkdir(path, *args, **options))

    def _link(self, source: str, path: str | os.PathLike[str]) -> None:
        self._make(os.fspath(path), lambda: self._real.link(source, path))

    def _unlink(self, path: str) -> None:
        self._change(path)
        self._find(path)
        self._real.unlink(path)
        self._names.pop(path, None)

    _remove = _unlink

    def _rmdir(self, path: str) -> None:
        self._change(path)
        self._real.rmdir(path)
        self._names.pop(path, None)

    def _replace(self, source: str, path: str | os.PathLike[str]) -> None:
        target = self._follow(os.fspath(path))
        host = self._change(target)
        _forget(host, source)
        new = _Version(self.now, host)
        before = self._names.get(target, [_Version(-math.inf, None)]) if stat.S_ISREG(self.kind(target)) else []
        if before:
            before[-1].copy = f"{self._aside}/{next(self._numbers)}"
            self._real.link(target, before[-1].copy)
        self._real.replace(source, target)
        for name in [name for name in self._names if (name + os.sep).startswith(source + os.sep)]:
            self._names[target + name[len(source) :]] = self._names.pop(name)
        self._names[target] = [*before[-3:], new]
        if stat.S_ISDIR(self.kind(target)):
            self._moved.append((source, target, new))

    _rename = _replace

    def _stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        assert self._current is not None
        kept = self._current.host.attributes
        until, result = kept.get((path, follow_symlinks), (-1.0, None))
        if result is None or until < self.now:
            result = self._real.stat(self._find(path), follow_symlinks=follow_symlinks)
            until = self.now + self._random.choice((0.0, self._late * self._random.random()))
            kept[path, follow_symlinks] = until, result
        return result

    def _lstat(self, path: str) -> os.stat_result:
        return self._stat(path, follow_symlinks=False)

    def _listdir(self, path: str) -> list[str]:
        return [entry.name for entry in self._scandir(path)]

    def _scandir(self, path: str) -> _Entries:
        self.sleep(self._step())
        with self._real.scandir(self._find(path)) as entries:
            return _Entries(entry for entry in entries if self._lists(entry.path))

    def _lists(self, path: str) -> bool:
        try:
            self._find(path)
        except FileNotFoundError:
            return False
        return True


def _forget(host: Host, *paths: str) -> None:
    for path in paths:
        host.attributes.pop((path, True), None)
        host.attributes.pop((path, False), None)


class _Entries(list[Any]):
    """The entries of a folder, as ``os.scandir`` returns them."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class _Event:
    """As ``threading.Event``, by simulated time."""

    def __init__(self, disk: SharedDisk) -> None:
        self._disk = disk
        self._is_set = False
        self._waiting: list[_Task] = []

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            task.wake = self._disk.now

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self._is_set = False

    def wait(self, seconds: float) -> bool:
        task = self._disk.task
        assert task is not None
        if not self._is_set:
            self._waiting.append(task)
            self._disk.sleep(seconds)
            self._waiting.remove(task)
        return self._is_set
