"""The units that a rank of a SLURM array does: its own, then those that other ranks have not begun or are late with.

No process hands units out to the tasks of an array. So a file for each unit, made exclusively, says which rank has it;
the next round begins without these files, since none of the ranks that made them is left. Taking what others have not
begun is work stealing (Blumofe and Leiserson 1999, doi:10.1145/324133.324234). Beginning once more what is late on
another rank is the backup task of MapReduce (Dean and Ghemawat 2004): one rank waits for such units, so that a slow or
hanging rank does not hold up all others, and no unit is begun a third time.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from uuid import uuid4

from sharmill.engine.attempts import MAX_ATTEMPTS, Attempts
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.stage import Stage
from sharmill.engine.stored import read_stored
from sharmill.engine.unit import Unit
from sharmill.ports import clock
from sharmill.storage import stopping_errors

log = logging.getLogger(__name__)

# A unit is late on another rank after so many times what is usual, and never before this many seconds.
_LATE = 3.0
_LEAST_SECONDS = 60.0
# At first it looks more often, for the end of small stages.
_FIRST_SECONDS = 0.5
_SECONDS_BETWEEN_LOOKS = 5.0
# Looking may take at most one part in so many of the time.
_LOOKING_SHARE = 50.0
# A shared disk that does not answer for so many looks will not do so soon.
_MOST_FAILED_LOOKS = 10
_WATCH = "watch"


class UnitsToDo:
    """The units of one rank, each taken before it is returned; ``own`` are those of its bin that are missing.

    ``taken`` is the folder of the files of what is taken.
    """

    def __init__(
        self, stage: Stage, taken: Path, rank: int, own: Iterable[Unit], is_stopped: Callable[[], bool]
    ) -> None:
        self._stage = stage
        self._taken = _TakenFiles(taken, rank)
        self._is_stopped = is_stopped
        self._attempts = Attempts(stage.dir.attempts)
        # Units that may have ended a rank before come last, so that they keep no others from being done.
        self._own = deque(sorted(own, key=self._num_attempts))
        self._tried: set[int] = set()
        self._again: set[int] = set()

    def __iter__(self) -> Iterator[Unit]:
        yield from self._own_units()
        yield from self._free_units()
        yield from self._late_units()

    def is_empty(self) -> bool:
        """Return True if nothing is left that this rank could do: then no model need be loaded."""
        if any(map(self._is_free, self._own)):
            return False
        missing = self._missing()
        return not (any(map(self._is_free, missing)) or (missing and self._taken.is_mine(_WATCH)))

    def following(self) -> Unit | None:
        """Return the unit that will probably be next, if it is one of the rank's own."""
        return self._own[0] if self._own else None

    def interruptions(self, unit: Unit) -> int:
        """Return how often attempts at a unit were broken off, as far as this rank has seen."""
        return self._attempts.interruptions[unit.index]

    def failed(self, unit: Unit) -> None:
        """Have a unit come once more, after the rank's others."""
        self._own.append(unit)

    def done(self, unit: Unit) -> None:
        """Note that a unit is done, so that the rank that was late with it leaves."""
        if unit.index in self._again:
            self._taken.take(_done(unit.index))

    def may_leave(self, index: int) -> bool:
        """Return True if the rank is late with a unit which another has done, and has nothing else left."""
        return index not in self._again and not self._own and self._taken.exists(_done(index))

    def may_publish(self, unit: Unit) -> bool:
        """Return True if this process publishes a unit; with mixed kinds of device, others may have other bytes."""
        return not self._stage.mixed_devices or self._taken.take_alone(f"{unit.index}-published")

    def are_all_over(self) -> bool:
        """Return True if no rank can do anything more for the stage: each unit is done, or was given up.

        Only the rank that waits for the others looks.
        """
        if not self._taken.is_mine(_WATCH):
            return False
        counts = Attempts(self._stage.dir.attempts).counts
        return all(counts[unit.index] >= MAX_ATTEMPTS for unit in self._uncommitted())

    def _num_attempts(self, unit: Unit) -> int:
        return self._attempts.counts[unit.index] + self._attempts.interruptions[unit.index]

    def _is_free(self, unit: Unit) -> bool:
        return self._attempts.counts[unit.index] < MAX_ATTEMPTS and self._taken.is_free(str(unit.index))

    def _may_begin(self, unit: Unit) -> bool:
        if self._attempts.counts[unit.index] >= MAX_ATTEMPTS:
            return False
        name = str(unit.index)
        if not self._taken.make(name):
            if not self._taken.is_mine(name):
                return False
            # An earlier process of this rank had taken it: whether this one is late with it counts from now on.
            self._taken.renew(name)
            # Another rank may have begun it once more since.
            if not self._taken.is_free(_again(unit.index)):
                return False
        self._tried.add(unit.index)
        self._attempts.counts[unit.index] += 1
        return True

    def _own_units(self) -> Iterator[Unit]:
        while self._own:
            unit = self._own.popleft()
            if self._may_begin(unit):
                yield unit

    def _free_units(self) -> Iterator[Unit]:
        """Yield units that no rank has begun, the largest first."""
        listed: set[str] = set()
        for unit in sorted(self._missing(), key=lambda unit: (self._num_attempts(unit), -unit.cost)):
            if str(unit.index) not in listed and self._may_begin(unit):
                yield unit
                yield from self._own_units()
                # Others have begun some meanwhile, and asking for one after the other is work for the file system.
                listed = self._taken.names()

    def _uncommitted(self) -> list[Unit]:
        units = load_plan(self._stage)
        done = read_ledger(self._stage.dir, units)
        return [unit for unit in units if unit.index not in done]

    def _missing(self) -> list[Unit]:
        """Return the units that nobody has ended and that this process has not tried."""
        return [unit for unit in self._uncommitted() if unit.index not in self._tried]

    def _late_units(self) -> Iterator[Unit]:
        """Yield the units that other ranks are late with. One rank waits for these, until all others are done."""
        failed_looks = 0
        pause = min(_FIRST_SECONDS, _SECONDS_BETWEEN_LOOKS)
        if not self._taken.take(_WATCH):
            return
        while not self._is_stopped():
            began = clock.monotonic()
            try:
                is_over, late = self._look()
                failed_looks = 0
            except OSError as error:
                failed_looks += 1
                pause = _SECONDS_BETWEEN_LOOKS
                log.warning("the units of other ranks cannot be looked at: %s", error)
                is_over, late = failed_looks == _MOST_FAILED_LOOKS, None
            if late is not None:
                yield late
                yield from self._own_units()
            elif is_over:
                return
            else:
                clock.sleep(max(pause, _LOOKING_SHARE * (clock.monotonic() - began)))
                pause = min(2 * pause, _SECONDS_BETWEEN_LOOKS)

    def _look(self) -> tuple[bool, Unit | None]:
        """Return whether no unit of another rank is to be waited for, and one to begin now, if there is one."""
        self._attempts = Attempts(self._stage.dir.attempts)
        units = load_plan(self._stage)
        commits = read_ledger(self._stage.dir, units)
        seconds = sum(commit.seconds for commit in commits.values())
        cost = sum(units[index].cost for index in commits)
        running = [
            unit
            for unit in units
            if unit.index not in commits
            and unit.index not in self._tried
            and self._attempts.counts[unit.index] < MAX_ATTEMPTS
            and self._taken.is_free(_again(unit.index))
        ]
        now = clock.of_folder(self._taken.folder)
        for unit in running:
            taken_at = self._taken.time_of(str(unit.index))
            if taken_at is None:
                if self._may_begin(unit):
                    return False, unit
                continue
            is_late = cost and now - taken_at > max(_LEAST_SECONDS, _LATE * unit.cost * seconds / cost)
            # It may have been done since the ledger was read.
            if is_late and self._taken.take(_again(unit.index)) and not read_ledger(self._stage.dir, [unit]):
                self._tried.add(unit.index)
                self._again.add(unit.index)
                return False, unit
        return not running, None


class _TakenFiles:
    """The files of what ranks have taken, as a process of one rank makes and reads them."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self._rank = str(rank).encode()
        self._process = f"{rank} {uuid4().hex}".encode()

    def take(self, name: str) -> bool:
        """Take what a name stands for; return True if it is this rank's, now or since before it was requeued."""
        return self.make(name) or self.is_mine(name)

    def take_alone(self, name: str) -> bool:
        """Do so for this process: an earlier one of the rank may live on, on a node that was lost."""
        return self._make(name, self._process) or read_stored(self.folder / name) == self._process

    def make(self, name: str) -> bool:
        """Take what nobody has taken; return False where somebody has, be it this rank."""
        return self._make(name, self._rank)

    def _make(self, name: str, content: bytes) -> bool:
        path = self.folder / name
        with stopping_errors(path):
            try:
                with path.open("xb") as stream:
                    stream.write(content)
            except FileExistsError:
                return False
            except OSError:
                path.unlink(missing_ok=True)
                raise
        return True

    def renew(self, name: str) -> None:
        """Set the time at which it was taken to now, by the clock of the file system."""
        path = self.folder / name
        with stopping_errors(path):
            os.utime(path)

    def is_mine(self, name: str) -> bool:
        path = self.folder / name
        return path.exists() and read_stored(path) == self._rank

    def is_free(self, name: str) -> bool:
        """Return True if this rank could take it."""
        return self.is_mine(name) or not self.exists(name)

    def exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def names(self) -> set[str]:
        """Return what is taken by any rank."""
        return {path.name for path in self.folder.iterdir()}

    def time_of(self, name: str) -> float | None:
        """Return the time at which it was taken, by the clock of the file system, or None where it is not."""
        try:
            return (self.folder / name).stat().st_mtime
        except FileNotFoundError:
            return None


def _again(index: int) -> str:
    return f"{index}-again"


def _done(index: int) -> str:
    return f"{index}-done"
