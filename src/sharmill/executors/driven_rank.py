"""Messages from ranks to a driver that hands units out one by one, and its answer to them; for processes and actors."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from sharmill.engine.attempts import MAX_ATTEMPTS
from sharmill.engine.outcomes import BrokenDevice, FailedAttempt
from sharmill.engine.stage import Stage
from sharmill.engine.time_limit import find_limit
from sharmill.engine.unit import Commit, Unit
from sharmill.engine.worker import MAX_BROKEN_DEVICES
from sharmill.errors import ConfigError, DeviceError, FatalError, SharmillError
from sharmill.executors.unit_queue import UnitQueue
from sharmill.ports import clock, process

log = logging.getLogger(__name__)

# Codes of errors that another try in the same place would end with as well.
FINAL_CODES = frozenset({"disk", "other_device", "unlike_nodes"})
# A rank whose units fail one after the other may itself be what is broken, as after an error on its GPU.
_FAILURES_IN_A_ROW = 2


@dataclass(frozen=True)
class Ready:
    """The first answer of a rank: it has loaded its model."""

    host: str = field(default_factory=lambda: process.gethostname())
    pid: int = field(default_factory=lambda: process.getpid())


@dataclass(frozen=True)
class Advanced:
    """The answer of a rank in the middle of a unit: so much of the unit's cost is done."""

    done: float


Answer = Ready | Advanced | Commit | FailedAttempt | SharmillError


def as_answer(error: ConfigError | FatalError) -> SharmillError:
    """Return an error that ends the stage, made anew: what a library attached to it may not be picklable."""
    if isinstance(error, DeviceError):
        return DeviceError(str(error), place=error.place, code=error.code)
    kind = ConfigError if isinstance(error, ConfigError) else FatalError
    return kind(str(error), code=error.code)


@dataclass(kw_only=True)
class DrivenRank:
    """A rank on the driver's side, be it a process or an actor.

    ``following`` is set aside for it, so that it can make its input ready while it does ``unit``.
    """

    number: int
    ready: bool = False
    unit: Unit | None = None
    following: Unit | None = None
    unit_began: float = 0.0
    failures_in_a_row: int = 0
    is_broken: bool = False

    def take_unit(self, queue: UnitQueue, set_aside_beyond: int | None = None) -> Unit | None:
        """Take the next unit, if there is one, and return it.

        The one behind it is set aside where so many more wait: the last ones go to whichever rank is free first.
        """
        self.unit, self.unit_began = self.following or queue.take(), clock.monotonic()
        self.following = None
        if set_aside_beyond is not None and len(queue) > set_aside_beyond:
            self.following = queue.take()
        return self.unit

    def give_back(self, queue: UnitQueue) -> None:
        """Give the unit that is set aside back: this rank will not do it."""
        if self.following is not None:
            queue.give_back(self.following)
            self.following = None

    def handle_answer(self, answer: Answer, queue: UnitQueue) -> None:
        """Handle the answer to the request to get ready or to do ``unit``.

        Raises:
            DeviceError: the answer is that this rank cannot work on its device or node.
            ConfigError, FatalError: the answer is that the stage cannot go on.
        """
        if isinstance(answer, SharmillError):
            raise answer
        if isinstance(answer, Ready):
            log.info("rank %d is ready: process %d on %s", self.number, answer.pid, answer.host)
            self.ready = True
            return
        if isinstance(answer, Advanced):
            assert self.unit is not None
            queue.advanced(self.unit, answer.done)
            return
        unit, self.unit = self.unit, None
        assert unit is not None
        if isinstance(answer, Commit):
            self.failures_in_a_row = 0
            queue.done(unit, answer)
            return
        if isinstance(answer, BrokenDevice):
            self.is_broken = True
            queue.interrupted(unit, answer, most=MAX_BROKEN_DEVICES)
            return
        self.failures_in_a_row += 1
        queue.failed(unit, answer)

    def needs_replacing(self) -> bool:
        """Return True if a fresh rank has to take its place."""
        if self.is_broken:
            log.warning("rank %d is replaced: its device works no more in its process", self.number)
            return True
        if self.failures_in_a_row < _FAILURES_IN_A_ROW:
            return False
        log.warning("rank %d is replaced after %d failures in a row", self.number, self.failures_in_a_row)
        return True

    def report_lost_unit(
        self, queue: UnitQueue, how: str, stage: Stage, details: str = "", *, excused: bool = False
    ) -> None:
        """Give the unit of a rank that has ended back to the queue; the attempt counts unless excused."""
        if self.unit is None:
            return
        limit = find_limit(stage.unit_time_limit, self.unit)
        if limit is not None and clock.monotonic() - self.unit_began >= limit and not excused:
            how = f"it took longer than executor.unit_time_limit of {limit:g} s"
        message = f"{how}; its log is {stage.dir.rank_log(self.number)}"
        lost = queue.interrupted if excused else queue.failed
        lost(self.unit, FailedAttempt(self.unit.index, message, details or message))


class FailedStarts:
    """Counts of ranks that ended before they were ready, since the last that was ready in the same place."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self.last = ""

    def add(self, how: str, place: Hashable = None, *, final: bool = False) -> int:
        """Count one more, or where it is final all, and return how many there are in this place now."""
        self._counts[place] += MAX_ATTEMPTS if final else 1
        self.last = how
        return self._counts[place]

    def reset(self, place: Hashable = None) -> None:
        """Begin to count anew: a rank is ready there."""
        del self._counts[place]

    def too_many(self, place: Hashable = None) -> bool:
        """Return True if no more ranks should be tried in this place."""
        return self._counts[place] >= MAX_ATTEMPTS
