"""Processes of a simulation and their threads, and how they end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Killed(BaseException):
    """The end of a process that is killed, raised in its frames to remove them."""


class Stuck(BaseException):
    """A schedule that does not come to its end."""


@dataclass(eq=False)
class Task:
    """A thread of a simulated process. ``turn`` tells its last place in the agenda from earlier ones."""

    process: SimProcess
    greenlet: Any = None
    turn: int = 0
    is_over: bool = False
    waiting: list[Task] = field(default_factory=list)


@dataclass(eq=False)
class SimProcess:
    """A simulated process.

    Attributes:
        status: its exit status, None while it runs; minus the number of the signal that killed it.
        operations_left: how many file operations it lives for; None for no limit.
        on_end: called with it once it has ended.
        handlers: of signals, by number; a signal without one kills it.
        told_at: when it got its first SIGTERM.
        ended_at: when it ended.
        children: those that it has started.
        dies_with_parent: it is killed when the one that has started it ends.
    """

    pid: int
    name: str
    host: str
    environ: dict[str, str]
    on_end: Callable[[SimProcess], None]
    status: int | None = None
    operations_left: int | None = None
    tasks: list[Task] = field(default_factory=list)
    signals: deque[int] = field(default_factory=deque)
    handlers: dict[int, Any] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    locked: list[tuple[int, int]] = field(default_factory=list)
    began: float = 0.0
    told_at: float = math.inf
    ended_at: float = math.inf
    children: list[SimProcess] = field(default_factory=list)
    dies_with_parent: bool = False

    @property
    def is_dead(self) -> bool:
        return self.status is not None
