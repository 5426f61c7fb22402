"""Work ahead of a model: the batches of a unit, loaded while it computes, and the next unit, begun meanwhile."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from itertools import chain, islice
from typing import Final, Generic, TypeVar

from sharmill.engine.delays import spent_on
from sharmill.engine.stage import Processor
from sharmill.engine.unit import Unit
from sharmill.prefetch import prefetch

BATCHES_AHEAD: Final = 2

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")
Begun = TypeVar("Begun")


class LoadedBatches(Generic[Item, Loaded]):
    """Batches of items whose loading has begun. It is made when the first item is loaded, and some batches are held.

    Args:
        items: all of them.
        batches: their numbers.
        load: loads an item; an error is raised where the batch of the item would have come.
        threads: how many load.
        weigh: returns the weight of an item.
        batch_weight: of a batch.
    """

    def __init__(
        self,
        items: Sequence[Item],
        batches: Sequence[Sequence[int]],
        load: Callable[[Item], Loaded],
        *,
        threads: int,
        weigh: Callable[[Item], float],
        batch_weight: float,
    ) -> None:
        self.items = items
        self.batches = batches
        in_order = [items[index] for batch in batches for index in batch]
        loaded = prefetch(load, in_order, threads=threads, ahead=BATCHES_AHEAD * batch_weight, weigh=weigh)
        self._loaded = chain(list(islice(loaded, 1)), loaded)

    def take(self, when_all_begun: Callable[[], None]) -> Iterator[list[Loaded]]:
        """Yield what was loaded of each batch; ``when_all_begun`` is called at each of the last, which load by then."""
        for number, batch in enumerate(self.batches, start=1):
            if number + BATCHES_AHEAD > len(self.batches):
                when_all_begun()
            with spent_on("decoding"):
                loaded = [next(self._loaded) for _ in batch]
            yield loaded


class AheadProcessor(Processor, Generic[Begun]):
    """A processor that begins its next unit in a thread while the unit before it is at work.

    Another unit than the expected one may come: what was begun is dropped then. An error is raised where the unit is
    taken, so that it ends that unit and no other.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="next-unit")
        self._expected: Unit | None = None
        self._begun: tuple[Unit, Future[Begun]] | None = None

    @abstractmethod
    def begin(self, unit: Unit) -> Begun:
        """Begin to load the input of a unit."""

    def expect(self, unit: Unit | None) -> None:
        self._expected = unit

    def begin_next(self) -> None:
        """Begin the expected unit, since the one at work has nothing more to load."""
        unit, self._expected = self._expected, None
        if unit is not None:
            self._begun = unit, self._pool.submit(copy_context().run, self.begin, unit)

    def take(self, unit: Unit) -> Begun:
        """Return what ``begin`` makes of a unit."""
        with spent_on("decoding"):
            if self._begun is None or self._begun[0] != unit:
                self._drop()
                return self.begin(unit)
            (_, begun), self._begun = self._begun, None
            return begun.result()

    def close(self) -> None:
        """Wait for what has been begun, and drop it."""
        self._drop()
        self._pool.shutdown()

    def _drop(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[1].cancel()
