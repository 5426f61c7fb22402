"""The time that an attempt at a unit may take: one that hangs would keep its rank for ever."""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from sharmill.engine.unit import Unit

# No stage is known to be as slow, by record or by second of audio; a disk or a model server may stand still.
_SECONDS_OF_COST = 10.0
_LEAST_SECONDS = 3600.0
# Native code does not see the exception that is to end it.
_SECONDS_TO_FAIL = 60.0


class UnitTimedOut(Exception):
    """The end of an attempt that took too long."""


def find_limit(setting: float | Literal["auto"] | None, unit: Unit) -> float | None:
    """Return how many seconds an attempt at a unit may take by ``executor.unit_time_limit``; None for any number."""
    return max(_LEAST_SECONDS, _SECONDS_OF_COST * unit.cost) if setting == "auto" else setting


@contextmanager
def ended_after(seconds: float | None, *, in_driver: bool) -> Iterator[Callable[[], None]]:
    """End this process after so many seconds, even in native code that holds Python's lock, and print where it was.

    Where it is the driver's own process, an exception ends the attempt first, and the process only if that is not seen.
    Native code that calls Python may swallow it: what is yielded raises it again, and so does the end of the body.

    Raises:
        UnitTimedOut: the attempt took too long, and this is the driver's process.
    """
    if seconds is None:
        yield lambda: None
        return
    # Handlers of signals belong to the main thread.
    raises = in_driver and threading.current_thread() is threading.main_thread()
    is_over, is_armed = False, True

    def require_time() -> None:
        if is_over and is_armed:
            raise UnitTimedOut(f"it took longer than executor.unit_time_limit of {seconds:g} s")

    def fail(number: int, frame: FrameType | None) -> None:
        nonlocal is_over
        is_over = True
        require_time()

    before = signal.signal(signal.SIGALRM, fail) if raises else None
    faulthandler.dump_traceback_later(seconds + (_SECONDS_TO_FAIL if raises else 0.0), exit=True, file=2)
    try:
        if raises:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        yield require_time
        require_time()
    finally:
        # An alarm that comes from here on raises nothing, so that all of this is done.
        is_armed = False
        faulthandler.cancel_dump_traceback_later()
        if raises:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
