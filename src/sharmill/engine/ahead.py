"""Prefetching for a model: load the input of the next unit while the current unit is processed."""

from abc import abstractmethod
from typing import Any, Generic, TypeVar

from sharmill.engine.delays import spent_on
from sharmill.engine.feeders import Feeders
from sharmill.engine.stage import Processor
from sharmill.engine.unit import Unit

Begun = TypeVar("Begun")


class AheadProcessor(Processor, Generic[Begun]):
    """A processor whose feeders load the next unit while the current unit is processed.

    If the next unit is not the expected one, the prefetched input is dropped. An error during prefetching is raised
    only when that unit is taken, so no other unit fails because of it.
    """

    def __init__(self, feeders: Feeders[Any, Any]) -> None:
        self.feeders = feeders
        self._expected: Unit | None = None
        self._begun: tuple[Unit, Begun | Exception] | None = None

    @abstractmethod
    def begin(self, unit: Unit) -> Begun:
        """Start to load the input of a unit, and return the object that ``take`` will return for it."""

    def expect(self, unit: Unit | None) -> None:
        self._expected = unit

    def begin_next(self) -> None:
        """Start to load the input of the expected unit; called when the current unit has requested all its input."""
        unit, self._expected = self._expected, None
        if unit is not None:
            try:
                with spent_on("decoding"):
                    self._begun = unit, self.begin(unit)
            except Exception as error:  # noqa: BLE001 - ``take`` raises it
                self._begun = unit, error

    def take(self, unit: Unit) -> Begun:
        """Return the result of ``begin`` for a unit, prefetched if possible."""
        with spent_on("decoding"):
            ready, self._begun = self._begun, None
            begun = self.begin(unit) if ready is None or ready[0] != unit else ready[1]
            if isinstance(begun, Exception):
                raise begun
            # Drop the input of units that failed or that other ranks have completed.
            self.feeders.drop_earlier()
            return begun

    @property
    def memory_mb(self) -> float:
        return self.feeders.memory_mb

    def close(self) -> None:
        self.feeders.close()
