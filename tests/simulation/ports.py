"""What a kernel puts behind ``sharmill.ports``: simulated clocks, processes, threads and events."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.kernel import Kernel
    from simulation.tasks import Task

# The simulated year 2033; any other would do.
EPOCH = 2e9


def clock_port(kernel: Kernel) -> dict[str, Any]:
    """Return the functions of ``sharmill.ports.clock``. The clocks of hosts are apart, that of files is its own."""

    def of_folder(folder: Path) -> float:
        if kernel.is_running:
            kernel.wait(kernel.latency())
        return EPOCH + kernel.now

    def time() -> float:
        return EPOCH + kernel.now + (kernel.skew(kernel.running.host) if kernel.is_running else 0.0)

    return {"monotonic": lambda: kernel.now, "sleep": kernel.sleep, "time": time, "of_folder": of_folder}


def process_port(kernel: Kernel) -> dict[str, Any]:
    """Return the functions of ``sharmill.ports.process``."""

    def is_gone(pid: int, started: int | None = None) -> bool:
        return pid not in kernel.processes or kernel.processes[pid].is_dead

    def set_handler(number: int, handler: Any) -> Any:
        before = kernel.running.handlers.get(number)
        special = {signal.SIG_DFL: None, signal.SIG_IGN: lambda number, frame: None}
        kernel.running.handlers[number] = special.get(handler, handler)
        return before

    def raise_signal(number: int) -> None:
        handler = kernel.running.handlers.get(number)
        if handler is None:
            kernel.kill(kernel.running, -number)
        handler(number, None)

    return {
        "Event": partial(SimEvent, kernel),
        "Thread": partial(SimThread, kernel),
        "ThreadPoolExecutor": InlinePool,
        "end_at_once": lambda status: kernel.kill(kernel.running, status),
        "environ": Environment(kernel),
        "getpid": lambda: kernel.running.pid,
        "gethostname": lambda: kernel.running.host,
        "interrupt": lambda: kernel.send(kernel.running, 2),
        "is_gone": is_gone,
        "raise_signal": raise_signal,
        "seconds_since_start": lambda: kernel.now - kernel.running.began,
        "set_handler": set_handler,
        "state_and_start": lambda pid: ("R", int(100 * kernel.processes[pid].began)),
        "tell_to_end": lambda pid: kernel.send(kernel.processes[pid], signal.SIGTERM),
        "this_kernel": lambda: f"kernel of {kernel.running.host}",
    }


def ended_after_port(kernel: Kernel) -> Callable[..., Any]:
    """Return what takes the place of ``time_limit.ended_after``, whose clock is the real one."""

    @contextmanager
    def ended_after(seconds: float | None, *, in_driver: bool) -> Iterator[Callable[[], None]]:
        running, is_over = kernel.running, [False]

        def end() -> None:
            if not is_over[0] and not running.is_dead:
                kernel.kill(running, 1)

        if seconds is not None:
            kernel.at(seconds, end)
        try:
            yield lambda: None
        finally:
            is_over[0] = True

    return ended_after


class Environment(MutableMapping[str, str]):
    """The environment of whichever process runs."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @property
    def _values(self) -> dict[str, str]:
        return self._kernel.running.environ if self._kernel.is_running else {}

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class SimEvent:
    """An event that threads of one simulated process wait for."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            self._kernel.wake(task)
        self._waiting.clear()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiting.append(self._kernel.current)
            self._kernel.wait(timeout)
        return self._is_set


class SimThread:
    """A thread of a simulated process."""

    def __init__(
        self, kernel: Kernel, *, target: Callable[..., None], args: Any = (), name: str = "", daemon: bool = False
    ) -> None:
        self._kernel = kernel
        self._work = partial(target, *args)
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._kernel.start(self._kernel.running, self._work)

    def join(self, timeout: float | None = None) -> None:
        # In a process that has been killed nothing is waited for.
        while self._task is not None and not self._task.is_over and not self._kernel.running.is_dead:
            self._task.waiting.append(self._kernel.current)
            self._kernel.wait(timeout)
            if timeout is not None:
                return


class InlinePool:
    """A pool of threads that does everything when it is submitted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:  # noqa: BLE001 - the future has it
            future.set_exception(error)
        return future
