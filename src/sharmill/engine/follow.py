"""Follows the ranks of a stage by what they write: commits, failures and progress, for a listener to show."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sharmill.engine.fence import require_current
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.progress import read_progress
from sharmill.engine.run_notes import require_not_cancelled
from sharmill.engine.stage import Stage
from sharmill.engine.state import StageState
from sharmill.engine.unit import Unit

log = logging.getLogger(__name__)


class Follower:
    """Tells a listener what the ranks of a stage do, each time that it looks; and in the end, how that ended.

    Args:
        units: those that the listener knows to be missing.

    Attributes:
        num_done: how many units ranks have committed since this was made.
        num_ready: how many ranks have loaded what they need.
    """

    def __init__(self, stage: Stage, units: Sequence[Unit], listener: Listener, join_seconds: float = 0.0) -> None:
        self._stage = stage
        self._listener = listener
        self._state = StageState(stage, join_seconds=join_seconds)
        # Of those that other ranks have done before, where this process joins them, nothing is told.
        self._given = frozenset(unit.index for unit in units)
        self._untold = set(self._given)
        self._failures: dict[int, int] = {}
        self._given_up: set[int] = set()
        self._were_ready: set[int] = set()
        self._loading = 0
        self._shows_progress = True
        self.num_done = 0
        self.num_ready = 0

    @property
    def num_missing(self) -> int:
        """The number of units that are not committed."""
        return len(self._state.missing)

    def look(self) -> bool:
        """Report what is new, and return True if the stage has ended.

        An error of the display costs only the progress within units.

        Raises:
            FatalError: a user has cancelled the run.
        """
        require_not_cancelled(self._stage.run_dir)
        state, attempts = self._state, self._state.attempts
        for commit in state.look():
            if commit.index not in self._untold:
                continue
            self._untold.remove(commit.index)
            self.num_done += 1
            self._listener.unit_done(state.units[commit.index], commit)
        for index in sorted(self._given & attempts.failed):
            failures = attempts.num_failures(index)
            if failures > self._failures.get(index, 0):
                self._failures[index] = failures
                error = attempts.require_error(index)
                log.warning("unit %d failed, attempt %d: %s", index, failures, error.message)
                if index not in state.missing:
                    continue  # another attempt was faster than this look
                self._advance(index, 0.0)
                if index not in self._given_up and attempts.is_given_up(index, state.live_slots()):
                    self._given_up.add(index)
                    self._listener.unit_failed(state.units[index], error, failures)
        has_ended = state.has_ended()
        self._show_ranks(has_ended=has_ended)
        return has_ended

    def _show_ranks(self, *, has_ended: bool) -> None:
        records = read_progress(self._stage.dir.progress)
        self.num_ready = sum(record.ready and not record.ended for record in records)
        self._were_ready |= {record.rank for record in records if record.ready}
        loading = 0 if has_ended else max(0, len(self._state.round.bins) - len(self._were_ready))
        if loading != self._loading:
            self._loading = loading
            self._listener.loading(loading)
        for record in [record for record in records if not record.ended]:
            if record.unit in self._state.missing and record.unit_cost_done > 0:
                self._advance(record.unit, record.unit_cost_done)

    def _advance(self, index: int, done: float) -> None:
        if not self._shows_progress:
            return
        try:
            self._listener.unit_advanced(self._state.units[index], done)
        except Exception:
            self._shows_progress = False
            log.warning("progress within units is no longer shown", exc_info=True)

    def outcome(self) -> StageResult:
        """Return how the work has ended, once no rank is left.

        Raises:
            SharmillError: an error has ended the stage, or no slot is left that could go on.
        """
        paths = self._stage.dir
        is_finished = paths.done.exists() and paths.read_token() == paths.token
        if not is_finished:
            require_current(self._stage)
        self.look()
        if is_finished:
            # Another process that is at work on it was faster.
            return StageResult()
        state, attempts = self._state, self._state.attempts
        if (stopped := attempts.stopped()) is not None:
            raise stopped
        out = attempts.slots_out()
        left = {index for index in state.missing if not attempts.is_given_up(index, ())}
        if left and out:
            raise attempts.all_out_error(self._stage.name, self._stage.dir.logs)
        failures = {index: attempts.require_error(index) for index in state.missing}
        for index in sorted(failures.keys() - self._given_up):
            self._listener.unit_failed(state.units[index], failures[index], attempts.num_failures(index))
        return StageResult(failures=failures, given_up=attempts.describe_out())
