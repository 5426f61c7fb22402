"""Ctrl-C and SIGTERM at moments at which nothing may be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Put off SIGINT and SIGTERM until the context ends; processes started in it never see a SIGINT.

    The handlers are exchanged because a signal may arrive in another thread, where no mask of this one holds it back;
    the mask is set because a started process inherits it.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread is ever interrupted.
        yield
        return
    arrived: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    previous = {number: signal.signal(number, remember) for number in _SIGNALS}
    try:
        yield
    finally:
        # What waits behind the mask is delivered here, while it is only remembered.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0])


class ToldToEnd(KeyboardInterrupt):
    """The end of an advance job by SIGTERM, as Ctrl-C ends other processes: no attempt at a unit is one that failed."""


@contextmanager
def ended_by_sigterm(error: type[BaseException] = ToldToEnd) -> Iterator[None]:
    """Have SIGTERM raise an error in the main thread, once.

    Submitit takes no notice of the signal, so a cancelled job would go on until SIGKILL.
    """
    told: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        told.append(number)
        # The way out is not to be interrupted.
        if len(told) == 1:
            raise error

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
