"""Follows the ranks of a stage by what they write: commits, failures and progress, for a listener to show."""

from __future__ import annotations

from collections.abc import Sequence

from sharmill.engine.fence import require_current
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.progress import read_progress
from sharmill.engine.run_notes import require_not_cancelled
from sharmill.engine.stage import Stage
from sharmill.engine.state import StageState
from sharmill.engine.unit import Unit


class Follower:
    """Tells a listener what the ranks of a stage do, each time that it looks; and in the end, how that ended.

    Args:
        units: those that the listener knows to be missing; of others nothing is told.

    Attributes:
        state: the state of the stage, as of the last look.
        num_ready: how many ranks have loaded what they need, and have not ended.
        given_up: sentences about places that the executor has given up, by which attempts can tell nothing.
    """

    def __init__(self, stage: Stage, units: Sequence[Unit], listener: Listener) -> None:
        self._stage = stage
        self._listener = listener
        self.state = StageState(stage)
        self._units = {unit.index: unit for unit in units}
        self.num_ready = 0
        self.given_up: list[str] = []

    @property
    def num_done(self) -> int:
        """The number of units that ranks have committed since this was made."""
        return len(self._units.keys() - self.state.missing)

    def look(self) -> bool:
        """Report what is new, and return True if the stage has ended.

        Raises:
            FatalError: a user has cancelled the run.
        """
        require_not_cancelled(self._stage.run_dir)
        for commit in self.state.look():
            if commit.index in self._units:
                self._listener.unit_done(self._units[commit.index], commit)
        has_ended = self.state.has_ended()
        records = read_progress(self._stage.dir.progress)
        self.num_ready = sum(record.ready and not record.ended for record in records)
        were_ready = {record.rank for record in records if record.ready}
        self._listener.loading(0 if has_ended else max(0, len(self.state.round.bins) - len(were_ready)))
        for record in records:
            unit = self._units.get(record.unit) if record.unit in self.state.missing else None
            if unit is not None and not record.ended and record.unit_cost_done > 0:
                self._listener.unit_advanced(unit, record.unit_cost_done)
        return has_ended

    def outcome(self) -> StageResult:
        """Return how the work has ended, once no rank is left.

        Raises:
            SharmillError: an error has ended the stage, or no slot is left that could go on.
        """
        self.look()
        paths = self._stage.dir
        if paths.done.exists() and paths.read_token() == paths.token:
            # Another process that is at work on it was faster.
            return StageResult()
        require_current(self._stage)
        state, attempts = self.state, self.state.attempts
        if attempts.stopped is not None:
            raise attempts.stopped
        out = attempts.describe_out()
        if out and not all(attempts.is_given_up(index, ()) for index in state.missing):
            raise attempts.all_out_error(self._stage.name, paths.logs)
        failures = {index: attempts.error(index) for index in sorted(state.missing)}
        return StageResult(failures=failures, given_up=self.given_up or out)
