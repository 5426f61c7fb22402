"""Work ahead of a model: the next unit is begun while the one before it is at work."""

from abc import abstractmethod
from typing import Any, Generic, TypeVar

from sharmill.engine.delays import spent_on
from sharmill.engine.feeders import Feeders
from sharmill.engine.stage import Processor
from sharmill.engine.unit import Unit

Begun = TypeVar("Begun")


class AheadProcessor(Processor, Generic[Begun]):
    """A processor that gives the tasks of its next unit to its feeders while the unit before it is at work.

    Another unit than the expected one may come: what was begun is dropped then. An error is raised where the unit is
    taken, so that it ends that unit and no other.
    """

    def __init__(self, feeders: Feeders[Any, Any]) -> None:
        self.feeders = feeders
        self._expected: Unit | None = None
        self._begun: tuple[Unit, Begun | Exception] | None = None

    @abstractmethod
    def begin(self, unit: Unit) -> Begun:
        """Begin to load the input of a unit."""

    def expect(self, unit: Unit | None) -> None:
        self._expected = unit

    def begin_next(self) -> None:
        """Begin the expected unit, since the one at work has nothing more to load."""
        unit, self._expected = self._expected, None
        if unit is not None:
            try:
                with spent_on("decoding"):
                    self._begun = unit, self.begin(unit)
            except Exception as error:  # noqa: BLE001 - it is raised by ``take``
                self._begun = unit, error

    def take(self, unit: Unit) -> Begun:
        """Return what ``begin`` makes of a unit."""
        with spent_on("decoding"):
            ready, self._begun = self._begun, None
            begun = self.begin(unit) if ready is None or ready[0] != unit else ready[1]
            if isinstance(begun, Exception):
                raise begun
            # Of units that have failed, or were begun and done by others.
            self.feeders.drop_earlier()
            return begun

    @property
    def memory_mb(self) -> float:
        return self.feeders.memory_mb

    def close(self) -> None:
        self.feeders.close()
