"""Breakdown of a rank's time: seconds spent waiting for decoding, running the model, and accessing the disk."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

_seconds: defaultdict[str, float] = defaultdict(float)


Delay = Literal["decoding", "model", "disk"]


def add_delay(delay: Delay, seconds: float) -> None:
    """Add seconds to the total of a kind of delay, for the rank in this process."""
    _seconds[delay] += seconds


@contextmanager
def spent_on(delay: Delay) -> Iterator[None]:
    """Add the duration of a ``with`` block to the total of a kind of delay, for the rank in this process.

    Use it only in the thread that processes the units, because work in other threads does not delay the rank.
    """
    started = time.monotonic()
    try:
        yield
    finally:
        add_delay(delay, time.monotonic() - started)


def take_delays() -> dict[str, float]:
    """Return the seconds spent on each kind of delay since the last call, and reset the totals."""
    taken = {name: round(seconds, 3) for name, seconds in sorted(_seconds.items())}
    _seconds.clear()
    return taken
