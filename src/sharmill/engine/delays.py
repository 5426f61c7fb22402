"""Where the time of a rank goes: seconds of waiting for decoding, of its model's work, and of the disk."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

_seconds: defaultdict[str, float] = defaultdict(float)


Delay = Literal["decoding", "model", "disk"]


def add_delay(delay: Delay, seconds: float) -> None:
    """Add time to that of a kind, for the rank that this process is."""
    _seconds[delay] += seconds


@contextmanager
def spent_on(delay: Delay) -> Iterator[None]:
    """Add the time of a context to that of a kind, for the rank that this process is.

    For the one thread that does the units: what runs ahead beside it delays nothing.
    """
    started = time.monotonic()
    try:
        yield
    finally:
        add_delay(delay, time.monotonic() - started)


def take_delays() -> dict[str, float]:
    """Return the seconds since the last call, by kind, and begin anew."""
    taken = {name: round(seconds, 3) for name, seconds in sorted(_seconds.items())}
    _seconds.clear()
    return taken
