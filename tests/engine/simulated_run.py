"""A run of a toy stage on simulated hosts, which see a real folder as through NFS.

One task runs at a time, until it accesses the folder, sleeps or waits, which takes a random time. The seed and the
faults therefore determine the whole run. A host sees new names and replaced files of other hosts up to ``late`` seconds
late, and caches attributes for as long. A file that it opens is complete, and its own creations, renames and removals
take effect at once.
"""

from __future__ import annotations

import builtins
import errno
import io
import logging
import math
import os
import pickle
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from greenlet import getcurrent, greenlet
from support.toy_stage import ToyStage

from sharmill.engine.attempts import Attempts
from sharmill.engine.claims import Claims
from sharmill.engine.executor import Listener, StageResult, Unlocked
from sharmill.engine.fence import wait_for_plan
from sharmill.engine.launch import driven_launch, read_attempts
from sharmill.engine.parent import Rank
from sharmill.engine.plan import iterate_ledger
from sharmill.engine.progress import RankProgress
from sharmill.engine.run import locked, run_stage
from sharmill.engine.stage import Advance, StageRun
from sharmill.engine.unit import Commit, Output, Unit
from sharmill.engine.watch import Watcher
from sharmill.engine.work import Replace, work
from sharmill.errors import SharmillError
from sharmill.files.checksums import checksum
from sharmill.files.shared_disk import VisibilityTimeout
from sharmill.files.staging import Staging, token_staging

# The longest durations of a step, one of which is chosen at random.
_STEP_SECONDS = (0.001, 0.01, 0.1, 1.0)

_NAMES = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "listdir", "scandir", "stat", "lstat", "utime")


class Killed(BaseException):
    """The end of a thread on a dead host, whose steps have no effect any more."""


@dataclass(frozen=True)
class Fault:
    """A fault of a host before its n-th change in a folder, or of a file.

    Args:
        folder: the name of the folder or file.
        nth: the number of the change.
        seconds: the duration for which the thread or the whole host hangs; if infinite, the host is dead.
        whole: True if the whole host hangs, not only the thread.
    """

    folder: str
    nth: int
    seconds: float
    whole: bool = True


@dataclass(eq=False)
class Host:
    """A machine. Its clock is ``ahead`` of others by some seconds, and only its first ``good_for`` attempts succeed."""

    name: str
    ahead: float = 0.0
    faults: tuple[Fault, ...] = ()
    good_for: float = math.inf
    frozen_until: float = 0.0
    changes: Counter[str] = field(default_factory=Counter)
    attributes: dict[tuple[str, bool], tuple[float, os.stat_result]] = field(default_factory=dict)


class _Version:
    """A file or folder behind a name since a certain time; ``copy`` has the bytes of a replaced file."""

    def __init__(self, since: float, maker: Host | None) -> None:
        self.since = since
        self.maker = maker
        self.copy: str | None = None
        self.delays: dict[Host, float] = {}


class _Task(greenlet):
    """A thread of a host, which runs between two switches; it continues at the time ``wake``."""

    def __init__(self, host: Host, wake: float, target: Callable[[], object], parent: greenlet) -> None:
        super().__init__(parent=parent)
        self.host = host
        self.wake = wake
        self._target = target

    def run(self) -> None:
        with suppress(Killed):
            self._target()

    @property
    def due(self) -> float:
        return max(self.wake, self.host.frozen_until)


class SharedDisk:
    """The simulation, as a context that replaces functions of ``os``, ``io`` and ``time`` with those of the hosts.

    Args:
        root: the folder that all hosts share.
        backup: an empty folder on the same file system, for replaced files.
        seed: the seed of all random choices.
        late: the longest delay, in seconds, until a host sees a change by another host.
    """

    running: SharedDisk

    def __init__(self, root: Path, backup: Path, seed: int, late: float) -> None:
        self.now = 0.0
        self._end = math.inf
        self.tasks: list[_Task] = []
        self._root = f"{root}{os.sep}"
        self._backup = backup
        self._random = Random(seed)
        self._late = late
        self._names: dict[str, list[_Version]] = {}
        self._moved: list[tuple[str, str, _Version]] = []
        self._numbers = count()
        self._test = getcurrent()
        # Number of calls of each host below the run directory, including all fsyncs.
        self.requests: Counter[Host] = Counter()
        self._counted = f"{root}{os.sep}run{os.sep}"
        self._real = SimpleNamespace(**vars(os), io_open=io.open)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> SharedDisk:
        SharedDisk.running = self
        real_time = SimpleNamespace(**vars(time))
        for name in _NAMES:
            self._patch.setattr(os, name, self._covering(getattr(os, name), getattr(self, f"_{name}")))
        for module in (io, builtins):
            self._patch.setattr(module, "open", self._covering(io.open, self._io_open))
        self._patch.setattr(os, "urandom", self._random.randbytes)
        self._patch.setattr("sharmill.files.locks.random", self._random)
        self._patch.setattr(os, "fsync", self._fsync)
        for name, clock in (("monotonic", real_time.monotonic), ("time", real_time.time)):
            self._patch.setattr(time, name, lambda clock=clock: self.clock() if self.task else clock())
        self._patch.setattr(time, "sleep", lambda seconds: (self.sleep if self.task else real_time.sleep)(seconds))
        threads = SimpleNamespace(Thread=self._thread, Event=lambda: _Event(self))
        self._patch.setattr("sharmill.engine.progress.threading", threads)
        return self

    def __exit__(self, *exception: object) -> None:
        for task in self.tasks:
            task.host.frozen_until = math.inf
            while not task.dead:
                with suppress(Exception):
                    task.switch()
        self._patch.undo()

    @property
    def task(self) -> _Task | None:
        """The calling task, None outside of tasks."""
        current = getcurrent()
        return current if isinstance(current, _Task) else None

    @property
    def host(self) -> Host:
        """The host of the calling task."""
        assert self.task is not None
        return self.task.host

    def clock(self) -> float:
        return 1e9 + self.now + self.host.ahead

    def start(self, host: Host, target: Callable[[], object], delay: float = 0.0) -> _Task:
        """Add a thread of a host."""
        self.tasks.append(_Task(host, self.now + delay, target, self._test))
        return self.tasks[-1]

    def run(self, most_seconds: float, after_step: Callable[[], object] = lambda: None) -> None:
        """Run all threads until they end, which must happen within ``most_seconds`` of simulated time."""
        self._end = most_seconds
        while True:
            live = [task for task in self.tasks if not task.dead and task.host.frozen_until < math.inf]
            if not live:
                return
            task = min(live, key=lambda task: task.due)
            self.now = max(self.now, task.due)
            assert self.now < self._end, "the stage does not end"
            task.switch()
            after_step()

    def sleep(self, seconds: float) -> None:
        """Let other threads run for so many seconds."""
        task = self.task
        assert task is not None
        task.wake = self.now + seconds
        others = (other.due for other in self.tasks if other is not task and not other.dead)
        if task.due < min(self._end, *others, math.inf):
            self.now = max(self.now, task.due)  # this task is the next one again
        elif task.host.frozen_until < math.inf:
            self._test.switch()
        if task.host.frozen_until == math.inf:
            raise Killed

    def _thread(self, target: Callable[[], object], **_: Any) -> Any:
        host = self.host
        started: list[_Task] = []

        def join() -> None:
            while not started[0].dead:
                self.sleep(self._step())

        return SimpleNamespace(start=lambda: started.append(self.start(host, target)), join=join)

    def _fsync(self, file: int) -> None:
        if self.task is not None:
            self.requests[self.host] += 1
            self.sleep(self._step())

    def _step(self) -> float:
        return self._random.choice(_STEP_SECONDS) * self._random.random()

    def _covering(self, real: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``own`` for paths in the folder from tasks, and ``real`` otherwise."""

        def call(path: Any = ".", *args: Any, **options: Any) -> Any:
            name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            if self.task is None or options.get("dir_fd") is not None or not name.startswith(self._root):
                return real(path, *args, **options)
            options.pop("dir_fd", None)
            self.requests[self.host] += name.startswith(self._counted)
            return own(self._follow(name), *args, **options)

        return call

    def _follow(self, path: str) -> str:
        """Return the present path of a path on this host, which may still use the old name of a renamed folder."""
        for old, new, version in self._moved:
            if (path + os.sep).startswith(old + os.sep) and not self._is_seen(version):
                path = new + path[len(old) :]
        return path

    def _is_seen(self, version: _Version) -> bool:
        host = self.host
        if host is version.maker:
            return True
        if host not in version.delays:
            version.delays[host] = self._random.choice((0.0, 0.0, self._late * self._random.random()))
        return version.since + version.delays[host] <= self.now

    def _find(self, path: str) -> str:
        """Return the path of the bytes that this host sees under a name."""
        end = len(self._root)
        while end >= 0:
            end = path.find(os.sep, end + 1)
            if versions := self._names.get(path if end < 0 else path[:end]):
                seen = next((version for version in reversed(versions) if self._is_seen(version)), None)
                if seen is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return (seen.copy if versions and seen else None) or path

    def _change(self, path: str) -> Host:
        """Spend the time of a change, before which a fault may happen to the host."""
        host = self.host
        seconds = self._step()
        for name in (Path(path).parent.name, Path(path).name):
            for fault in host.faults:
                if (fault.folder, fault.nth) == (name, host.changes[name]):
                    seconds += fault.seconds
                    if fault.whole or fault.seconds == math.inf:
                        host.frozen_until = self.now + fault.seconds
            host.changes[name] += 1
        self.sleep(seconds)
        parent = path.rpartition(os.sep)[0]
        self._find(parent)
        _forget(host, path, parent)
        return host

    def kind(self, path: str | os.PathLike[str]) -> int:
        """Return the true mode of the file at a path, 0 if there is none."""
        with suppress(FileNotFoundError):
            return self._real.lstat(path).st_mode
        return 0

    def _make(self, path: str, make: Callable[[], Any]) -> Any:
        host = self._change(path)
        is_new = self.kind(path) == 0
        try:
            made = make()
        except FileExistsError:
            self._names.pop(path, None)  # the host has learnt from the server that the name exists
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

    def _unlink(self, path: str) -> None:
        self._change(path)
        self._find(path)
        self._real.unlink(path)
        self._names.pop(path, None)

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
            before[-1].copy = f"{self._backup}/{next(self._numbers)}"
            self._real.link(target, before[-1].copy)
        self._real.replace(source, target)
        for name in [name for name in self._names if (name + os.sep).startswith(source + os.sep)]:
            self._names[target + name[len(source) :]] = self._names.pop(name)
        self._names[target] = [*before, new]
        if stat.S_ISDIR(self.kind(target)):
            self._moved.append((source, target, new))

    _rename = _replace

    def _stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        kept = self.host.attributes
        until, result = kept.get((path, follow_symlinks), (-1.0, None))
        if result is None or until < self.now:
            result = self._real.stat(self._find(path), follow_symlinks=follow_symlinks)
            until = self.now + self._random.choice((0.0, self._late * self._random.random()))
            kept[path, follow_symlinks] = until, result
        return result

    def _lstat(self, path: str) -> os.stat_result:
        return self._stat(path, follow_symlinks=False)

    def _utime(self, path: str, *args: Any, **options: Any) -> None:
        self.sleep(self._step())
        self._real.utime(path, *args, **options)

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
    """The entries of a folder, like the result of ``os.scandir``."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class _Event:
    """A ``threading.Event`` in simulated time."""

    def __init__(self, disk: SharedDisk) -> None:
        self._disk = disk
        self._is_set = False
        self._waiting: list[_Task] = []

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            task.wake = self._disk.now

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


class _Supervisor:
    """The supervisor of a rank: a thread on its host that watches the stage and wakes the rank after changes."""

    interval = math.inf

    def __init__(self, disk: SharedDisk, stage: StageRun, number: int, host: Host) -> None:
        self._stage = stage
        self._number = number
        self._changed = _Event(disk)
        self._has_ended = False
        disk.start(host, self._look)

    def tell(self, progress: RankProgress) -> None:
        pass

    def wait(self, seconds: float) -> None:
        if seconds:
            self._changed.wait(seconds)
            self._changed.clear()

    def end(self) -> None:
        self._has_ended = True

    def _look(self) -> None:
        watcher = Watcher(self._stage, number=self._number)
        while not self._has_ended:
            before = watcher.state
            try:
                watcher.look()
            except FileNotFoundError:
                pass  # not visible yet, or removed with the plan
            except SharmillError as error:
                log.info("%s", error)
                break
            if watcher.state != before:
                self._changed.set()
            time.sleep(15.0)
        watcher.close()


log = logging.getLogger(__name__)

MOST_SECONDS = 1800.0
SECONDS_BETWEEN_LOOKS = 3.0


class SimulatedStage(ToyStage):
    """Takes some seconds for a unit, and fails with bad units and on bad hosts."""

    bad_units: frozenset[int] = frozenset()
    seconds = 5.0

    def mark(self, name: str, line: str = "") -> None:
        pass

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        host = SharedDisk.running.host
        time.sleep(self.seconds * unit.cost)
        host.good_for -= 1
        if unit.index in self.bad_units or host.good_for < 0:
            raise ValueError("a bad day")
        names = [f"first/{unit.index:06d}.txt", f"last/{unit.index:06d}.txt"]
        for name in names:
            staging.path(name).write_text(name)
        return Output(files=names, num_out=unit.size)


@dataclass
class Run:
    """Drivers of one stage, and the ranks that the first driver starts.

    Args:
        disk: the simulated disk.
        stage: the stage to run.
        ranks: the hosts of the ranks, named like their slots.
        delays: seconds until each rank starts.
        is_led: True if the driver leads; otherwise supervisors do.
    """

    waits: ClassVar[bool] = True
    disk: SharedDisk
    stage: SimulatedStage
    ranks: Sequence[Host]
    delays: Sequence[float]
    is_led: bool = True
    results: list[StageResult] = field(default_factory=list)
    started: list[Any] = field(default_factory=list)
    planned: Any = None
    begun: dict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    finished: dict[Path, tuple[int, int]] = field(default_factory=dict)
    finished_at: float = math.inf
    next_look: float = 0.0

    def drive(self) -> None:
        """Run the stage, or the rest of it, as soon as no other driver holds the lock."""
        stage: StageRun = pickle.loads(pickle.dumps(self.stage.in_run))
        with locked(stage.run_dir, wait_seconds=MOST_SECONDS) as lock:
            self.results.append(run_stage(stage, self, Listener(), unlocked=lock.released))

    def run(self, stage: StageRun, units: Sequence[Unit], listener: Listener, unlocked: Unlocked) -> StageResult:
        """Process the units like an executor. A driver that joins another one adds no ranks, and only watches."""
        self.planned = stage
        with driven_launch(stage, units, len(self.ranks), join_seconds=stage.options.lease_seconds) as numbers:
            if not numbers.start:
                self.started += [
                    self.disk.start(host, partial(self._work, pickle.dumps(stage), number, host), delay)
                    for number, (host, delay) in enumerate(zip(self.ranks, self.delays, strict=True))
                ]
            watcher = Watcher(stage, units, listener, number=0 if self.is_led else 1 << 20)
            left = MOST_SECONDS
            with unlocked():
                while not watcher.look() and left > 0.0:
                    time.sleep(5.0)
                    if all(rank.dead for rank in self.started):
                        left = min(left, stage.options.seconds_until_seen) - 5.0
        return watcher.outcome()

    def _work(self, stage: bytes, number: int, host: Host) -> None:
        """Run a rank, and its supervisor."""
        planned = pickle.loads(stage)
        wait_for_plan(planned, VisibilityTimeout(planned.options.seconds_until_seen))
        supervisor = _Supervisor(self.disk, planned, number, host)
        while True:
            try:
                work(pickle.loads(stage), Rank(number, host.name, "cpu", most_pause=300.0), supervisor)
            except Replace:
                continue
            except SharmillError as error:
                log.info("%s", error)
            except FileNotFoundError:
                # The folders are removed when the stage is finished.
                if self.disk.kind(token_staging(self.stage.root, self.planned.token)):
                    raise
            supervisor.end()
            return

    def look(self) -> None:
        """Remember the files of the stage once it is finished, and check the commits every few seconds."""
        if not self.finished and self.stage.dir.done.exists():
            self.finished, self.finished_at = self.outcome_files(), self.disk.now
        if self.planned and self.disk.now >= self.next_look:
            self.next_look = self.disk.now + SECONDS_BETWEEN_LOOKS
            self.commits()

    def outcome_files(self) -> dict[Path, tuple[int, int]]:
        """Return the inodes and times of all files that a finished stage has published."""
        paths = list(self.stage.root.glob("[!.]*/*"))
        paths += [path for path in (self.stage.root / "merged.txt", self.stage.dir.done) if path.exists()]
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}

    def commits(self) -> dict[int, list[Commit]]:
        """Return all commits of each unit, and check that all their files are in place."""
        found = defaultdict(list)
        for commit in iterate_ledger(self.stage.dir):
            found[commit.index].append(commit)
            for file in commit.files:
                path = self.stage.root / file.name
                assert path.exists(), "a unit is committed before it is published"
                assert checksum(path) == file.xxh3, "a committed file has other bytes"
        return found

    def attempts(self) -> Attempts:
        """Return the attempts at all units."""
        return read_attempts(self.stage.in_run)


def simulate(
    folder: Path,
    ranks: Sequence[Host],
    delays: Sequence[float] = (),
    *,
    units: int,
    bad_units: frozenset[int] = frozenset(),
    late: float = 0.0,
    seed: int = 0,
    drivers: Sequence[float] = (0.0,),
    is_led: bool = True,
    seconds: float = 5.0,
) -> Run:
    """Run a stage on simulated hosts, and return the run when all drivers and ranks have ended or died.

    Args:
        drivers: seconds until each driver starts; all of them are on one host.
        is_led: see ``Run``.
        seconds: duration of a unit.
    """
    shared, backup = folder / "shared", folder / "backup"
    shared.mkdir()
    backup.mkdir()
    stage = SimulatedStage(shared, units=units, max_reject_fraction=1.0, seconds_until_seen=60.0)
    stage.bad_units, stage.seconds = bad_units, seconds
    with SharedDisk(shared, backup, seed, late) as disk, pytest.MonkeyPatch.context() as patch:
        run = Run(disk, stage, ranks, delays or [0.0] * len(ranks), is_led)
        make = Claims.make

        def note_claim(claims: Claims, unit: int, generation: int) -> bool:
            is_made = make(claims, unit, generation)
            if is_made:
                run.begun[unit, generation].add(claims.rank.owner)
            return is_made

        patch.setattr(Claims, "make", note_claim)
        host = Host("driver")
        for delay in drivers:
            disk.start(host, run.drive, delay)
        disk.run(MOST_SECONDS, run.look)
    return run
