"""Worker processes of the local executor in a simulation: child processes, their pipes and their ends."""

from __future__ import annotations

import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

from sharmill.executors.local import executor, rank_process
from sharmill.processes import ChildEnded, describe_exit
from simulation.kernel import Kernel
from simulation.tasks import SimProcess, Task

# Of the environment: the process that has started this one.
PARENT = "SIM_PARENT"


class _Pipe:
    """One direction of a pipe. ``waiting`` are the tasks that something in it wakes."""

    def __init__(self, kernel: Kernel, waiting: list[Task]) -> None:
        self._kernel = kernel
        self.messages: deque[bytes] = deque()
        self.waiting = waiting

    def put(self, message: Any) -> None:
        self.messages.append(pickle.dumps(message))
        self.wake()

    def wake(self) -> None:
        for task in self.waiting:
            self._kernel.wake(task, self._kernel.random.random() * 0.01)
        self.waiting.clear()


class _Connection:
    """The child's end of the pipes, as ``rank_main`` has it."""

    def __init__(self, kernel: Kernel, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._kernel = kernel
        self._incoming = incoming
        self._outgoing = outgoing

    def send(self, message: Any) -> None:
        self._outgoing.put(message)

    def recv(self) -> Any:
        while not self._incoming.messages:
            self._incoming.waiting.append(self._kernel.current)
            self._kernel.wait(None)
        return pickle.loads(self._incoming.messages.popleft())


class SimChild:
    """A simulated ``ChildProcess``. It is its own handle and its own end of the pipe."""

    def __init__(self, kernel: Kernel, target: Callable[..., None], *args: Any, name: str, server: SimServer) -> None:
        self._kernel = kernel
        self._down, self._up = _Pipe(kernel, []), _Pipe(kernel, [])
        connection = _Connection(kernel, self._down, self._up)
        parent = kernel.running
        environ = {**parent.environ, PARENT: str(parent.pid)}
        payload = pickle.dumps(args)

        def work() -> None:
            kernel.sleep(kernel.random.uniform(0.2, 3.0))
            target(connection, *pickle.loads(payload))

        self.process = kernel.spawn(f"{name} of {parent.name}", parent.host, work, environ=environ, on_end=self._ended)
        parent.children.append(self.process)

    def _ended(self, ended: SimProcess) -> None:
        self._up.wake()

    @property
    def handles(self) -> list[SimChild]:
        return [self]

    @property
    def connection(self) -> SimChild:
        return self

    def close(self) -> None:
        pass

    @property
    def exitcode(self) -> int | None:
        return self.process.status

    def is_alive(self) -> bool:
        return not self.process.is_dead

    def is_ready(self) -> bool:
        """Return True if there is a message or an end."""
        return bool(self._up.messages) or self.process.is_dead

    def wait_with(self, task: Task) -> None:
        """Have a task woken by the next message, or the end."""
        self._up.waiting.append(task)

    def send(self, message: Any) -> None:
        if self.process.is_dead:
            raise ChildEnded("it has ended")
        self._down.put(message)

    def receive(self, timeout: float | None = None) -> Any:
        if self._up.messages:
            return pickle.loads(self._up.messages.popleft())
        if self.process.is_dead:
            raise ChildEnded("it has ended")
        raise TimeoutError("no message yet")

    def terminate(self) -> None:
        self._kernel.send(self.process, signal.SIGTERM)

    def kill(self) -> None:
        self._kernel.kill(self.process)

    def join(self, timeout: float | None = None) -> None:
        _wait(self._kernel, [self], timeout)

    def describe_exit(self) -> str:
        return describe_exit(self.exitcode)


class SimServer:
    """A simulated ``ForkServer``. It has no process: its children end with the one that has it."""

    def __init__(self, modules: Sequence[str], setup: Callable[[], None]) -> None:
        pass

    def is_alive(self) -> bool:
        return True

    def await_imports(self) -> None:
        pass

    def end(self) -> None:
        pass


def _wait(kernel: Kernel, children: Sequence[SimChild], timeout: float | None) -> None:
    """Wait until one of the children has sent something, or has ended."""
    until = float("inf") if timeout is None else kernel.now + timeout
    while kernel.now < until and not any(child.is_ready() for child in children):
        for child in children:
            child.wait_with(kernel.current)
        kernel.wait(None if timeout is None else until - kernel.now)


def _join_all(kernel: Kernel, children: Iterable[SimChild], seconds: float) -> None:
    until = kernel.now + seconds
    for child in children:
        while child.is_alive() and kernel.now < until:
            kernel.wait(min(0.1, until - kernel.now))


def _end_by_force(kernel: Kernel, children: Iterable[SimChild], seconds: float = 2.0) -> None:
    children = list(children)
    for child in children:
        child.terminate()
    _join_all(kernel, children, seconds)
    for child in children:
        child.kill()


@contextmanager
def installed(kernel: Kernel) -> Iterator[None]:
    """Put simulated child processes behind the local executor."""

    def no_context(*arguments: object) -> Any:
        return nullcontext()

    def nothing(*arguments: object) -> None:
        pass

    def die_with_parent() -> None:
        kernel.running.dies_with_parent = True
        if kernel.processes[int(kernel.running.environ[PARENT])].is_dead:
            kernel.kill(kernel.running)

    replaced = (
        (executor, "ChildProcess", partial(SimChild, kernel)),
        (executor, "ForkServer", SimServer),
        (executor, "wait", lambda handles, timeout: _wait(kernel, handles, timeout)),
        (executor, "join_all", partial(_join_all, kernel)),
        (executor, "end_by_force", partial(_end_by_force, kernel)),
        (executor, "usable_cores", lambda: 2),
        (rank_process, "limit_cores", nothing),
        (rank_process, "redirect_output", nothing),
        (rank_process, "logging_to", no_context),
        (rank_process, "_end_with_server", die_with_parent),
    )
    with ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
