"""Processes of several hosts in one thread, with simulated time: what happens follows from the seed alone.

A simulated process is a greenlet, and so is each of its threads. It runs shipped code as it is, and gives way to others
where it opens, lists or changes a file below the kernel's folder, where it sleeps or waits, and where it asks the
scheduler. The files are real ones. Python tells of each operation before it is done (audit hooks, PEP 578), and the
ports of ``sharmill.ports`` are exchanged as long as a kernel is installed.

A process that is killed never goes on: what its frames still try to do as they are removed is refused, so that no
``finally`` of it has an effect.
"""

from __future__ import annotations

import heapq
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from greenlet import getcurrent, greenlet

from sharmill.ports import clock, process
from simulation.ports import EPOCH, clock_port, process_port
from simulation.tasks import Killed, SimProcess, Stuck, Task

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = frozenset({"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.utime", "os.truncate"})
_OPERATIONS = _CHANGES | {"open", "os.listdir", "os.scandir"}
_KILLED_BY = -9
# No fault of a cluster has these as its end.
_MISTAKES = (TypeError, AttributeError, AssertionError, LookupError)


class Kernel:
    """The clock, the agenda and the processes of one schedule.

    Args:
        folder: only operations on what is below it are simulated.

    Attributes:
        now: simulated seconds since the beginning.
        trace: what has happened, a line each.
        mistakes: those lines of it that tell of errors in the code.
        slow_share: of the file operations, those that take seconds.
        on_rename: called with the process, the source and the goal of each rename that will succeed.
    """

    def __init__(self, seed: int, folder: Path, max_seconds: float = 1e6, max_operations: int = 40_000) -> None:
        self.random = random.Random(seed)
        self.folder = str(folder)
        self.now = 0.0
        self.trace: list[str] = []
        self.mistakes: list[str] = []
        self.processes: dict[int, SimProcess] = {}
        self.operations = 0
        self.slow_share = 0.02
        self.on_rename: Callable[[SimProcess, str, str], None] = lambda process, source, goal: None
        self._agenda: list[tuple[float, int, Callable[[], None], Task | None, int]] = []
        self._number = 0
        self._skews: dict[str, float] = {}
        self._hub = getcurrent()
        self.current: Task | None = None
        self._bytes = random.Random(seed + 1)
        self._max_seconds = max_seconds
        self._max_operations = max_operations

    # What happens.

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now:10.3f} {text}")

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Have something happen after so many seconds."""
        self._number += 1
        heapq.heappush(self._agenda, (self.now + delay, self._number, action, None, 0))

    def run(self) -> None:
        """Let everything happen that is to happen.

        Raises:
            Stuck: it does not end.
        """
        try:
            while self._agenda:
                when, _, action, task, turn = heapq.heappop(self._agenda)
                if task is None:
                    self.now = when
                    self._require_end()
                    action()
                elif task.turn == turn and not task.process.is_dead and not task.is_over:
                    self.now = when
                    self._require_end()
                    self.current = task
                    task.greenlet.switch()
                    self.current = None
        finally:
            self.current = None

    def _require_end(self) -> None:
        if self.now > self._max_seconds or self.operations > self._max_operations:
            raise Stuck(f"no end after {self.now:.0f} s and {self.operations} operations")

    def spawn(
        self, name: str, host: str, work: Callable[[], Any], *, environ: dict[str, str] | None = None,
        on_end: Callable[[SimProcess], None] = lambda process: None,
    ) -> SimProcess:  # fmt: skip
        """Start a process; its exit status is that of a Python which calls ``work``."""
        pid = 1000 + len(self.processes)
        new = SimProcess(pid, name, host, dict(environ or {}), on_end, began=self.now)
        self.processes[pid] = new
        self.note(f"{name} starts as process {pid} on {host}")
        self.start(new, partial(self._main, new, work))
        return new

    def kill(self, killed: SimProcess, status: int = _KILLED_BY) -> None:
        """End a process at once. From within it, this does not return."""
        if not killed.is_dead:
            self.note(f"{killed.name} (process {killed.pid}) is killed" if status < 0 else f"{killed.name} ends")
            self._end(killed, status)
        if self.current is not None and self.current.process is killed:
            raise Killed

    def send(self, receiver: SimProcess, number: int) -> None:
        """Send a signal to a process."""
        if receiver.is_dead:
            return
        receiver.told_at = min(receiver.told_at, self.now) if number == signal.SIGTERM else receiver.told_at
        if receiver.handlers.get(number) is None:
            self.kill(receiver, -number)
            return
        receiver.signals.append(number)
        self.wake(receiver.tasks[0])

    def alive(self) -> list[SimProcess]:
        """Return the processes that have not ended."""
        return [one for one in self.processes.values() if not one.is_dead]

    @property
    def running(self) -> SimProcess:
        """The process that runs now."""
        assert self.current is not None
        return self.current.process

    @property
    def is_running(self) -> bool:
        """True while a process runs, and not what is around them."""
        return self.current is not None

    def skew(self, host: str) -> float:
        """Return how many seconds a host's clock is ahead of that of the file system."""
        return self._skews.setdefault(host, self.random.uniform(-200.0, 200.0))

    # Tasks.

    def start(self, owner: SimProcess, work: Callable[[], None]) -> Task:
        task = Task(owner)

        def run() -> None:
            # Nothing is raised into the hub.
            try:
                work()
            except Killed:
                pass
            except Exception as error:  # noqa: BLE001 - as a Python does
                self.note(f"a thread of {owner.name} ends: {type(error).__name__}: {error}")
            task.is_over = True
            for other in task.waiting:
                self.wake(other)

        task.greenlet = greenlet(run, self._hub)
        owner.tasks.append(task)
        self.wake(task)
        return task

    def _main(self, owner: SimProcess, work: Callable[[], Any]) -> None:
        status = 0
        try:
            work()
        except SystemExit as error:
            status = error.code & 255 if isinstance(error.code, int) else int(error.code is not None)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - as a Python does
            self.note(f"{owner.name}: {type(error).__name__}: {error}")
            if isinstance(error, _MISTAKES):
                self.mistakes.append(self.trace[-1])
            status = 1
        if not owner.is_dead:
            self.note(f"{owner.name} ends with status {status}")
            self._end(owner, status)

    def _end(self, ended: SimProcess, status: int) -> None:
        ended.status, ended.ended_at = status, self.now
        self._touch_written(ended)
        for task in ended.tasks:
            task.turn += 1
            if task is not self.current and task.greenlet and not task.greenlet.dead:
                self._remove_frames(task)
        self.at(0.0, partial(self._after_end, ended))

    def _after_end(self, ended: SimProcess) -> None:
        for descriptor, inode in ended.locked:
            # As the kernel does. Others may have the number by now.
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    os.close(descriptor)
        for child in ended.children:
            if child.dies_with_parent:
                self.kill(child)
        ended.on_end(ended)

    def _remove_frames(self, task: Task) -> None:
        before, self.current = self.current, task
        # The frames end here rather than in the hub.
        task.greenlet.parent = getcurrent()
        task.greenlet.throw(Killed)
        self.current = before

    def wake(self, task: Task, delay: float = 0.0) -> None:
        """Have a task go on after so many seconds; what was to wake it before does not count any more."""
        task.turn += 1
        self._number += 1
        heapq.heappush(self._agenda, (self.now + delay, self._number, _nothing, task, task.turn))

    def wait(self, seconds: float | None) -> None:
        """Give way for so many seconds, or until something wakes the task; signals are handled in between."""
        task = self.current
        assert task is not None
        if task.process.is_dead:
            raise Killed
        until = None if seconds is None else self.now + seconds
        if until is None:
            task.turn += 1
        elif not task.process.signals and (not self._agenda or until < self._agenda[0][0]):
            # Nothing comes in between.
            self.now = until
            self._require_end()
            return
        else:
            self.wake(task, seconds)
        self._hub.switch()
        if task.process.is_dead:
            raise Killed
        if task is task.process.tasks[0]:
            while task.process.signals:
                number = task.process.signals.popleft()
                self.note(f"{task.process.name} gets {signal.Signals(number).name}")
                task.process.handlers[number](number, None)

    def sleep(self, seconds: float) -> None:
        """Wait so long, whatever signals come in between."""
        until = self.now + seconds
        self.wait(seconds)
        while self.now < until:
            self.wait(until - self.now)

    # File operations.

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle what Python is about to do."""
        task = self.current
        if task is None or event not in _OPERATIONS:
            if task is not None and event == "fcntl.flock":
                task.process.locked.append((arguments[0], os.fstat(arguments[0]).st_ino))
            return
        path = arguments[0]
        if isinstance(path, bytes | int):
            return
        path = os.fspath(path)
        if path.startswith("/") and not path.startswith(self.folder):
            return
        self._operation(task.process, event, path, arguments)

    def _operation(self, owner: SimProcess, event: str, path: str, arguments: tuple[Any, ...]) -> None:
        if owner.is_dead:
            raise Killed
        self._touch_written(owner)
        self.operations += 1
        if owner.operations_left is not None:
            owner.operations_left -= 1
            if owner.operations_left < 0:
                self.kill(owner)
        self.wait(self.latency())
        if event == "open" and path.startswith("/"):
            if arguments[2] & _WRITING:
                owner.written.append(path)
        elif event == "os.utime":
            owner.written.append(path)
        elif event == "os.rename":
            goal = os.fspath(arguments[1])
            if os.path.lexists(path) and Path(goal).parent.is_dir():
                self.on_rename(owner, path, goal)

    def latency(self) -> float:
        """Return how long a file operation takes: some milliseconds, and now and then seconds."""
        drawn = self.random.random()
        return drawn * 0.01 if drawn > self.slow_share else self.random.expovariate(0.3)

    def _touch_written(self, owner: SimProcess) -> None:
        """Give files that were written the simulated time; until now nobody else has had a turn."""
        if owner.written:
            before, self.current = self.current, None
            for path in owner.written:
                with suppress(OSError):
                    os.utime(path, (EPOCH + self.now, EPOCH + self.now))
            owner.written.clear()
            self.current = before

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Do file operations that are not simulated."""
        before, self.current = self.current, None
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def installed(self) -> Iterator[Kernel]:
        """Put this kernel behind the ports of the shipped code."""
        _install_hook()
        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(clock, **clock_port(self)))
            stack.enter_context(mock.patch.multiple(process, **process_port(self)))
            # Names of files, tokens and ids are drawn from the seed too.
            stack.enter_context(mock.patch.object(os, "urandom", self._bytes.randbytes))
            stack.enter_context(mock.patch.object(random, "_urandom", self._bytes.randbytes))
            for number in (signal.SIGINT, signal.SIGTERM):
                stack.callback(signal.signal, number, signal.getsignal(number))
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, []))
            stack.callback(self._remove_all)
            _installed.append(self)
            stack.callback(_installed.clear)
            yield self

    def _remove_all(self) -> None:
        for one in self.alive():
            one.status = _KILLED_BY
            for task in one.tasks:
                if task.greenlet and not task.greenlet.dead:
                    self._remove_frames(task)


def _nothing() -> None:
    pass


_installed: list[Kernel] = []
_has_hook: list[bool] = []


def _install_hook() -> None:
    """Have Python tell of its operations; this cannot be undone, and says nothing while no kernel is installed."""
    if not _has_hook:
        _has_hook.append(True)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if _installed:
                _installed[0].audit(event, arguments)

        sys.addaudithook(hook)


def make_folder() -> Path:
    """Return a new folder in memory, where that can be had."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="sharmill-simulation-", dir=memory if memory.is_dir() else None))
