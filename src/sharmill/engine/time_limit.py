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

# What the rank has done so far lets expect a time; a unit may take so many times that, and so many times the longest.
_TIMES_EXPECTED = 30.0
_TIMES_LONGEST = 3.0
# A disk or a model server may stand still for some minutes.
_LEAST_SECONDS = 1800.0
# Before the rank has done a unit: no stage is known to be as slow, by record or by second of audio.
_SECONDS_OF_COST = 10.0
_LEAST_SECONDS_OF_FIRST = 3600.0
# Native code does not see the exception that is to end it.
_SECONDS_TO_FAIL = 60.0


class UnitTimedOut(Exception):
    """The end of an attempt that took too long."""


class TimeLimit:
    """Limit of the units of one rank, as ``executor.unit_time_limit`` sets it: ``auto``, a number of seconds, or None.

    ``auto`` follows the unit's cost and the rate of the units that the rank has done. The rank itself counts, not the
    stage, since another may be several times as fast.
    """

    def __init__(self, setting: float | Literal["auto"] | None) -> None:
        self._setting = setting
        self._cost = 0.0
        self._seconds = 0.0
        self._longest = 0.0

    def note(self, unit: Unit, seconds: float) -> None:
        """Note that the rank has done a unit in so many seconds."""
        self._cost += unit.cost
        self._seconds += seconds
        self._longest = max(self._longest, seconds)

    def of(self, unit: Unit) -> float | None:
        """Return how many seconds an attempt at a unit may take, or None for any number."""
        if self._setting != "auto":
            return self._setting
        if not self._cost:
            return max(_LEAST_SECONDS_OF_FIRST, _SECONDS_OF_COST * unit.cost)
        expected = unit.cost * self._seconds / self._cost
        return max(_LEAST_SECONDS, _TIMES_EXPECTED * expected, _TIMES_LONGEST * self._longest)


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
