"""A process that follows a stage with ranks elsewhere: it tells a listener, and leads where nobody else does."""

import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import uuid4

from sharmill.engine.attempts import Claim
from sharmill.engine.executor import Listener, StageResult
from sharmill.engine.fence import require_current
from sharmill.engine.launch import make_claim
from sharmill.engine.lead import Leader, are_given_up
from sharmill.engine.notes import StageNotes
from sharmill.engine.progress import RankProgress, in_order
from sharmill.engine.stage import StageRun
from sharmill.engine.state import State, StateFile
from sharmill.engine.unit import Unit
from sharmill.errors import SharmillError
from sharmill.files.shared_disk import VisibilityTimeout

# Supervisors that miss a leader come one after the other.
_SECONDS_APART = 0.1


class Watcher:
    """One process as it follows a stage, and leads where nobody else does.

    Args:
        units: the missing units that the listener knows; it is told of no others.
        listener: of a driver; a supervisor has none, and reads what ranks have noted only while it leads.
        number: that of the supervisor's first rank; the lowest comes first where a leader is missing.

    Attributes:
        state: at the last look.
        given_up: sentences about places that the executor has given up, which no attempt has noted.
    """

    interval = 1.0

    def __init__(
        self, stage: StageRun, units: Sequence[Unit] = (), listener: Listener | None = None, *, number: int = 0
    ) -> None:
        self.stage = stage
        self.given_up: list[str] = []
        self.state = State()
        self._listener = listener
        self._units = {unit.index: unit for unit in units}
        self._file = StateFile(stage.ranks.state)
        self._patience = number * _SECONDS_APART
        self._id = uuid4().hex
        # The leader that this process is or has been.
        self._leader: Leader | None = None
        self._notes: StageNotes | None = None
        # The state that was seen last, and when this process may lead if that does not change.
        self._seen: tuple[int, int] | None = None
        self._leads_at = 0.0
        # The last that this process has tried to win.
        self._term = 0

    @property
    def notes(self) -> StageNotes:
        """All that was noted by the last look of a process that leads or has a listener."""
        if self._notes is None:
            self._notes = StageNotes(self.stage, for_people=self._listener is not None)
        return self._notes

    @property
    def leader(self) -> Leader | None:
        """The leader, if this process has led at its last look."""
        return self._leader if self._leader is not None and self.state.leader == self._id else None

    @property
    def ranks(self) -> list[RankProgress]:
        """The progress of all ranks, in their order."""
        return in_order(self.notes.ranks.values())

    @property
    def num_done(self) -> int:
        """The number of units that ranks have committed since this was made."""
        return len(self._units.keys() - self.notes.missing)

    @property
    def num_ready(self) -> int:
        """The number of ranks that have loaded what they need, and have not ended."""
        return sum(rank.ready > 0 and not rank.ended for rank in self.notes.ranks.values())

    def look(self) -> bool:
        """Read what is new, report it, lead if it is to be, and return True if the stage has ended.

        Raises:
            FatalError: a user has cancelled the run.
            FileNotFoundError: the folders have gone with the plan.
        """
        self.state = found = self._file.read()
        if found.stopped is not None and found.stopped.code == "cancelled":
            raise found.stopped.as_error()
        is_to_lead = self._is_to_lead(found)
        if self._listener is not None or is_to_lead:
            self._report()
        if self._leader is not None and is_to_lead:
            self.state = self._leader.lead(self.state)
        return self.state.ended

    def tell(self, progress: RankProgress) -> None:
        """Take note of what a rank of this process has said of itself."""
        if self._listener is not None:
            self.notes.hear(progress)

    def wait(self, seconds: float) -> None:
        """Look at the stage, for a rank in this process that has nothing to do for so long at most."""
        # Its end may be known here, and not be written yet.
        if not self.look() or not self._file.read().ended:
            time.sleep(min(seconds, 0.25))

    def close(self) -> None:
        """Leave the lead to others, if it was this process's."""
        with suppress(OSError, SharmillError):
            found = self._file.read()
            if self._leader is not None and found.leader == self._id and not self.state.ended:
                self._leader.write(self.state, found, leads=False)

    def outcome(self) -> StageResult:
        """Return how the work has ended, once no rank is left.

        Raises:
            SharmillError: an error has ended the stage, or no slot is left that could go on.
        """
        self.stage.run_dir.require_not_cancelled()
        paths = self.stage.dir
        with suppress(FileNotFoundError):  # what has gone with the plan
            self._report()
        if paths.done.exists() and paths.read_token() == self.stage.token:
            # Another process that is at work on it was faster.
            return StageResult()
        require_current(self.stage)
        # Other leaders may have noted something too, and seen more of what was done than can be seen here yet.
        notes = StageNotes(self.stage, for_people=False)

        def sees_all() -> bool:
            notes.look()
            return len(notes.missing) <= self.state.num_missing or not self.state.ended

        patience = VisibilityTimeout(self.stage.options.seconds_until_seen)
        patience.wait_until(sees_all, f"{self.stage.name}: what all ranks have noted")
        if notes.attempts.stopped is not None:
            raise notes.attempts.stopped
        if self.state.stopped is not None:
            raise self.state.stopped.as_error()
        out = notes.attempts.describe_out()
        if out and not are_given_up(notes.attempts, notes.missing, ()):
            raise notes.attempts.all_out_error(self.stage.name, paths.logs)
        failures = {index: notes.attempts.error(index) for index in sorted(notes.missing)}
        return StageResult(failures=failures, given_up=self.given_up or out)

    def _report(self) -> None:
        """Read the new notes of all ranks, and report them to the listener."""
        for commit in self.notes.look():
            if commit.index in self._units and self._listener is not None:
                self._listener.unit_done(self._units[commit.index], commit)
        if self._listener is not None:
            self._listener.looked(self.ranks)

    def _is_to_lead(self, found: State) -> bool:
        """Return True if this process is the leader, or the one that is there has given no heartbeat for a lease."""
        now, lease = time.monotonic(), self.stage.options.lease_seconds
        if self._leader is not None and found.leader == self._id:
            return True
        if self._seen != self._file.seen:
            self._seen, self._leads_at = self._file.seen, now + (lease if found.leader else 0.0) + self._patience
        if found.ended or now < self._leads_at:
            return False
        # One alone makes the file of the next term. If it dies before it writes the state, the term after that follows.
        self._leads_at = now + lease + self._patience
        self._term = max(found.term, self._term) + 1
        if not make_claim(self.stage, f"leader.{self._term}", Claim(owner=self._id)):
            return False
        self._leader = Leader(self.stage, self.notes, self._id, self._term)
        # At once: to read all notes takes a while, and meanwhile nobody else is to begin with that.
        self.state = self._leader.write(found, found)
        return True
