"""Ctrl-C and SIGTERM at moments at which nothing may be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """The end of a process by SIGTERM: preemption, the end of its job, or a cancelled run.

    As with Ctrl-C, no attempt at a unit has failed.
    """


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
    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        # What waits behind the mask is delivered here, while it is only remembered.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0])


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise ``Terminated`` in the main thread, once.

    Submitit takes no notice of the signal, so a cancelled job would go on until SIGKILL.
    """

    def end(number: int, frame: FrameType | None) -> None:
        # The way out is not to be interrupted.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
