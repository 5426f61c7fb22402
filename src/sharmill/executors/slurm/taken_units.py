"""The units that a rank of a SLURM array does: its own, then those that other ranks have not begun or are late with.

No process hands units out to the tasks of an array. So a file for each unit, made exclusively, says which rank has it;
the next round begins without these files, since none of the ranks that made them is left. Taking what others have not
begun is work stealing (Blumofe and Leiserson 1999, doi:10.1145/324133.324234). Beginning once more what is late on
another rank is the backup task of MapReduce (Dean and Ghemawat 2004): one rank waits for such units, so that a slow or
hanging rank does not hold up all others, and no unit is begun a third time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sharmill.engine.attempts import Attempts
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.stage import Stage
from sharmill.engine.stored import read_stored
from sharmill.engine.unit import Unit
from sharmill.engine.worker import MAX_ATTEMPTS
from sharmill.storage import clock_of, stopping_errors

# A unit is late on another rank after so many times what it would take this one, and never before this many seconds.
_LATE = 3.0
_LEAST_SECONDS = 60.0
_SECONDS_BETWEEN_LOOKS = 5.0
# Looking may take at most one part in so many of the time.
_LOOKING_SHARE = 50.0


class UnitsToDo:
    """The units of one rank, each taken before it is returned; ``own`` are those of its bin that are missing."""

    def __init__(self, stage: Stage, rank: int, own: Iterable[Unit], is_stopped: Callable[[], bool]) -> None:
        self._stage = stage
        self._taken = _TakenFiles(stage.dir.taken, rank)
        self._is_stopped = is_stopped
        self._attempts = Attempts(stage.dir.attempts)
        # Units that may have ended a rank before come last, so that they keep no others from being done.
        self._own = deque(sorted(own, key=self._num_attempts))
        self._mine: set[int] = set()
        self._cost = self._seconds = 0.0

    def __iter__(self) -> Iterator[Unit]:
        yield from self._own_units()
        for unit in sorted(self._missing(), key=lambda unit: (self._num_attempts(unit), -unit.cost)):
            if self._may_begin(unit):
                yield unit
                yield from self._own_units()
        yield from self._late_units()

    def is_empty(self) -> bool:
        """Return True if nothing is left that this rank could begin now: then no model need be loaded."""
        return not (any(map(self._is_free, self._own)) or any(map(self._is_free, self._missing())))

    def following(self) -> Unit | None:
        """Return the unit that will probably be next, if it is one of the rank's own."""
        return self._own[0] if self._own else None

    def interruptions(self, unit: Unit) -> int:
        """Return how often attempts at a unit were broken off before this rank began."""
        return self._attempts.interruptions[unit.index]

    def failed(self, unit: Unit) -> None:
        """Have a unit come once more, after the rank's others."""
        self._own.append(unit)

    def done(self, unit: Unit, seconds: float) -> None:
        """Note that a unit is done, and how long it took this rank."""
        self._cost += unit.cost
        self._seconds += seconds
        if self._taken.exists(_again(unit.index)):
            self._taken.take(_done(unit.index))

    def is_done_elsewhere(self, index: int) -> bool:
        """Return True if a rank that began a unit once more has ended it."""
        return self._taken.exists(_done(index))

    def may_publish(self, unit: Unit) -> bool:
        """Return True if this rank publishes a unit. Where kinds of device are mixed, bytes may be others' as well."""
        return not self._stage.mixed_devices or self._taken.take(f"{unit.index}-published")

    def _num_attempts(self, unit: Unit) -> int:
        return self._attempts.counts[unit.index] + self._attempts.interruptions[unit.index]

    def _is_free(self, unit: Unit) -> bool:
        return self._attempts.counts[unit.index] < MAX_ATTEMPTS and self._taken.is_free(str(unit.index))

    def _may_begin(self, unit: Unit) -> bool:
        if self._attempts.counts[unit.index] >= MAX_ATTEMPTS or not self._taken.take(str(unit.index)):
            return False
        self._mine.add(unit.index)
        self._attempts.counts[unit.index] += 1
        return True

    def _own_units(self) -> Iterator[Unit]:
        while self._own:
            unit = self._own.popleft()
            if self._may_begin(unit):
                yield unit

    def _missing(self) -> list[Unit]:
        """Return the units that nobody has ended and this rank, since it began, has not tried."""
        units = load_plan(self._stage)
        done = read_ledger(self._stage.dir, units)
        return [unit for unit in units if unit.index not in done and unit.index not in self._mine]

    def _late_units(self) -> Iterator[Unit]:
        """Yield the units that other ranks are late with; one rank waits for these, until all others are done."""
        if not self._cost or not self._seconds or not self._taken.take("watch"):
            return
        while not self._is_stopped():
            began = time.monotonic()
            self._attempts = Attempts(self._stage.dir.attempts)
            counts = self._attempts.counts
            running = [
                unit
                for unit in self._missing()
                if counts[unit.index] < MAX_ATTEMPTS and not self._taken.exists(_again(unit.index))
            ]
            if not running:
                return
            now = clock_of(self._stage.dir.taken)
            late = next((unit for unit in running if self._is_late(unit, now)), None)
            if late is not None and self._taken.take(_again(late.index)):
                self._mine.add(late.index)
                yield late
                yield from self._own_units()
            else:
                time.sleep(max(_SECONDS_BETWEEN_LOOKS, _LOOKING_SHARE * (time.monotonic() - began)))

    def _is_late(self, unit: Unit, now: float) -> bool:
        expected = unit.cost * self._seconds / self._cost
        return now - self._taken.time_of(str(unit.index)) > max(_LEAST_SECONDS, _LATE * expected)


class _TakenFiles:
    """The files of what ranks have taken, as one rank makes and reads them."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = str(rank).encode()

    def take(self, name: str) -> bool:
        """Take what a name stands for; return True if it is this rank's, now or since before it was requeued."""
        path = self._folder / name
        with stopping_errors(path):
            try:
                with path.open("xb") as stream:
                    stream.write(self._rank)
                return True
            except FileExistsError:
                return read_stored(path) == self._rank

    def is_free(self, name: str) -> bool:
        """Return True if this rank could take it."""
        path = self._folder / name
        return not path.exists() or read_stored(path) == self._rank

    def exists(self, name: str) -> bool:
        return (self._folder / name).exists()

    def time_of(self, name: str) -> float:
        """Return the time at which it was taken, by the clock of the file system."""
        return (self._folder / name).stat().st_mtime


def _again(index: int) -> str:
    return f"{index}-again"


def _done(index: int) -> str:
    return f"{index}-done"
