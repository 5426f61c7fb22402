"""The interface through which a run reports its progress to those who show it or log it."""

from __future__ import annotations

from collections.abc import Sequence

from sharmill.engine.outcomes import StageResult
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit


class Listener:
    """Base of those that follow a run: a subclass overrides the events that it shows; the others do nothing.

    All methods are called in the thread that runs the stage.
    """

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        """Take note that a stage begins; ``done`` are the commits of earlier runs."""

    def loading(self, num_ranks: int) -> None:
        """Take note that ``num_ranks`` ranks are starting and loading their models; called when the number changes."""

    def unit_advanced(self, unit: Unit, done: float) -> None:
        """Take note that an attempt has done ``done`` of the unit's cost so far; 0 where the attempt came to nothing.

        Called about once a second for units that take longer than that.
        """

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        """Take note that a unit is done."""

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        """Take note that a stage is done, or has units that failed, or is submitted."""
