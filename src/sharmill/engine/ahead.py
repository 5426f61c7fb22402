"""The input of a rank's next unit, made ready in a thread while the unit before it is at work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from sharmill.engine.unit import Unit

Loaded = TypeVar("Loaded")


class UnitsAhead(Generic[Loaded]):
    """The results of ``load`` for units, begun ahead for the unit that is expected.

    Another unit may come instead: what was made ready is then dropped. An error is raised where the unit is taken, so
    that it ends that unit and no other.

    Args:
        drop: called with what was made ready and is not taken.
    """

    def __init__(self, load: Callable[[Unit], Loaded], drop: Callable[[Loaded], None] = lambda loaded: None) -> None:
        self._load = load
        self._drop = drop
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="next-unit")
        self._expected: Unit | None = None
        self._begun: tuple[Unit, Future[Loaded]] | None = None

    def expect(self, unit: Unit | None) -> None:
        """Note the unit that will probably come after the one that is taken next."""
        self._expected = unit

    def begin(self) -> None:
        """Begin with the expected unit, since the one at work has nothing more to load."""
        unit, self._expected = self._expected, None
        if unit is not None:
            self._begun = unit, self._pool.submit(self._load, unit)

    def take(self, unit: Unit) -> Loaded:
        """Return what ``load`` makes of a unit."""
        if self._begun is None or self._begun[0] != unit:
            self._drop_begun()
            return self._load(unit)
        (_, begun), self._begun = self._begun, None
        return begun.result()

    def close(self) -> None:
        """Wait for what has been begun, and drop it."""
        self._drop_begun()
        self._pool.shutdown()

    def _drop_begun(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None and not begun[1].cancel():
            begun[1].add_done_callback(lambda done: None if done.exception() else self._drop(done.result()))
