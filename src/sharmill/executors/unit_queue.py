"""A queue of the units of a stage that are still to do, for executors that hand them out one by one."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence

from sharmill.engine.attempts import MAX_ATTEMPTS, MOST_INTERRUPTIONS
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import FailedAttempt
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.unit import Commit, Unit

log = logging.getLogger(__name__)


class UnitQueue:
    """Units in the order of their cost, largest first, and how often each was tried.

    Taken by whichever rank is free, this is greedy bin packing done as the work goes.

    Attributes:
        failures: the last error of every unit that has failed for good, by unit index.
    """

    def __init__(self, units: Sequence[Unit], rejects: RejectLimit, listener: Listener) -> None:
        self._waiting = deque(sorted(units, key=lambda unit: (-unit.cost, unit.index)))
        self._attempts: Counter[int] = Counter()
        self._interruptions: Counter[int] = Counter()
        self._rejects = rejects
        self._listener = listener
        self._shows_progress = True
        self.failures: dict[int, FailedAttempt] = {}

    def __len__(self) -> int:
        """Return how many units wait for a rank."""
        return len(self._waiting)

    def take(self) -> Unit | None:
        """Return the next unit to do, or None."""
        return self._waiting.popleft() if self._waiting else None

    def following(self) -> Unit | None:
        """Return what ``take`` would return next."""
        return self._waiting[0] if self._waiting else None

    def give_back(self, unit: Unit) -> None:
        """Take a unit back that was not begun: it is the next again."""
        self._waiting.appendleft(unit)

    def advanced(self, unit: Unit, done: float) -> None:
        """Report that an attempt has done so much of the unit's cost.

        A rank in this process calls it in the middle of the unit, which an error of the display must not fail.
        """
        if self._shows_progress:
            try:
                self._listener.unit_advanced(unit, done)
            except Exception:
                self._shows_progress = False
                log.warning("progress within units is no longer shown", exc_info=True)

    def done(self, unit: Unit, commit: Commit) -> None:
        """Report that an attempt has succeeded.

        Raises:
            FatalError: too many records of the stage are rejected now.
        """
        self._listener.unit_done(unit, commit)
        self._rejects.add([commit])

    def failed(self, unit: Unit, error: FailedAttempt) -> None:
        """Take a unit back whose attempt has failed: it waits again, or is given up."""
        self._listener.unit_advanced(unit, 0.0)
        self._attempts[unit.index] += 1
        attempts = self._attempts[unit.index]
        if attempts < MAX_ATTEMPTS:
            log.warning("unit %d failed (%s); it is tried again", unit.index, error.message)
            # Last in line: an error that passes, or that lies with one rank, then costs many units one attempt each
            # rather than a few units all of theirs.
            self._waiting.append(unit)
            return
        log.warning("unit %d failed %d times: %s", unit.index, attempts, error.message)
        self.failures[unit.index] = error
        self._listener.unit_failed(unit, error, attempts)

    def interrupted(self, unit: Unit, error: FailedAttempt, most: int = MOST_INTERRUPTIONS) -> None:
        """Take a unit back whose attempt was broken off, probably for no fault of the unit: it waits again.

        Where that has happened more often than ``most``, the attempt counts.
        """
        self._interruptions[unit.index] += 1
        if self._interruptions[unit.index] > most:
            self.failed(unit, error)
            return
        self._listener.unit_advanced(unit, 0.0)
        log.warning("unit %d was interrupted (%s); it is done again", unit.index, error.message)
        self._waiting.append(unit)
