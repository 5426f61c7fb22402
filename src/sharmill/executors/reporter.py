"""The progress of a stage as the process sees it that has started ranks, and its report to a listener."""

from collections.abc import Sequence

from sharmill.engine.executor import Listener, StageResult
from sharmill.engine.fence import require_current
from sharmill.engine.progress import RankProgress, read_progress
from sharmill.engine.stage import StageRun
from sharmill.engine.state import StageState
from sharmill.engine.unit import Unit


class ProgressReporter:
    """Tells a listener about the ranks of a stage at each look, and in the end how the stage ended.

    Args:
        units: the missing units that the listener knows; it is told of no others.

    Attributes:
        state: the state of the stage at the last look.
        ranks: the heartbeats of all ranks at the last look.
        given_up: sentences about places that the executor has given up, which no attempt has noted.
    """

    def __init__(self, stage: StageRun, units: Sequence[Unit] = (), listener: Listener | None = None) -> None:
        self.stage = stage
        self.state = StageState(stage)
        self.ranks: list[RankProgress] = []
        self.given_up: list[str] = []
        self._listener = listener or Listener()
        self._units = {unit.index: unit for unit in units}

    @property
    def num_done(self) -> int:
        """The number of units that ranks have committed since this was made."""
        return len(self._units.keys() - self.state.missing)

    @property
    def num_ready(self) -> int:
        """The number of ranks that have loaded what they need, and have not ended."""
        return sum(rank.ready > 0 and not rank.ended for rank in self.ranks)

    def look(self) -> bool:
        """Report what is new, and return True if the stage has ended.

        Raises:
            FatalError: a user has cancelled the run.
        """
        self.stage.run_dir.require_not_cancelled()
        self.report_commits()
        self.ranks = read_progress(self.stage.ranks.progress)
        self._listener.looked(self.ranks)
        return self.state.has_ended()

    def report_commits(self) -> None:
        """Read the new notes of all ranks, and report the units that they have committed."""
        for commit in self.state.look():
            if commit.index in self._units:
                self._listener.unit_done(self._units[commit.index], commit)

    def outcome(self) -> StageResult:
        """Return how the work has ended, once no rank is left.

        Raises:
            SharmillError: an error has ended the stage, or no slot is left that could go on.
        """
        self.look()
        paths = self.stage.dir
        if paths.done.exists() and paths.read_token() == self.stage.token:
            # Another process that is at work on it was faster.
            return StageResult()
        require_current(self.stage)
        attempts, missing = self.state.attempts, self.state.missing
        if attempts.stopped is not None:
            raise attempts.stopped
        out = attempts.describe_out()
        if out and not all(attempts.is_given_up(index, ()) for index in missing):
            raise attempts.all_out_error(self.stage.name, paths.logs)
        failures = {index: attempts.error(index) for index in sorted(missing)}
        return StageResult(failures=failures, given_up=self.given_up or out)
