"""Watching a running stage: report its progress to a listener, and lead the stage if no other process does."""

import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import uuid4

from sharmill.engine.attempts import Claim
from sharmill.engine.executor import Listener, StageResult
from sharmill.engine.fence import require_current
from sharmill.engine.launch import make_claim
from sharmill.engine.lead import Leader, all_given_up
from sharmill.engine.notes import StageNotes
from sharmill.engine.progress import RankProgress, in_order
from sharmill.engine.stage import StageRun
from sharmill.engine.state import State, StateFile
from sharmill.engine.unit import Unit
from sharmill.errors import SharmillError
from sharmill.files.shared_disk import VisibilityTimeout

# If the leader is missing, supervisors stagger their waits by this many seconds, so that they do not all try to lead at
# once.
_SECONDS_APART = 0.1


class Watcher:
    """Follows a stage for one process, and leads the stage if no other process does.

    Args:
        units: the missing units that the listener knows; commits of other units are not reported to it.
        listener: the listener of a driver. A supervisor has none, and reads the notes of ranks only while it leads.
        number: the number of the supervisor's first rank. If the leader is missing, the supervisor with the lowest
            number takes over first.

    Attributes:
        state: the state at the last call of ``look``.
        given_up: sentences about hosts or devices that the executor itself has given up, whether or not ranks have
            noted errors about them.
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
        self._delay = number * _SECONDS_APART
        self._id = uuid4().hex
        # The leader object; None until this process becomes the leader for the first time.
        self._leader: Leader | None = None
        self._notes: StageNotes | None = None
        # The state seen last, and the time at which this process may lead if the state does not change until then.
        self._seen: tuple[int, int] | None = None
        self._leads_at = 0.0
        # The last term for which this process has tried to become the leader.
        self._term = 0

    @property
    def notes(self) -> StageNotes:
        """The notes of all ranks; they are read again only while this process leads or has a listener."""
        if self._notes is None:
            self._notes = StageNotes(self.stage, for_people=self._listener is not None)
        return self._notes

    @property
    def leader(self) -> Leader | None:
        """The leader object if this process led the stage at its last look, otherwise None."""
        return self._leader if self._leader is not None and self.state.leader == self._id else None

    @property
    def ranks(self) -> list[RankProgress]:
        """The progress of all ranks, in the order of their numbers."""
        return in_order(self.notes.ranks.values())

    @property
    def num_done(self) -> int:
        """The number of missing units that were committed since this object was created."""
        return len(self._units.keys() - self.notes.missing)

    @property
    def num_ready(self) -> int:
        """The number of ranks that are loaded and have not ended."""
        return sum(rank.ready > 0 and not rank.ended for rank in self.notes.ranks.values())

    def look(self) -> bool:
        """Read the state, report changes to the listener, lead if necessary, and return True if the stage has ended.

        Raises:
            FatalError: a user has cancelled the run.
            FileNotFoundError: the folders were removed together with the plan.
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
        """Take note of the progress of a rank of this supervisor."""
        if self._listener is not None:
            self.notes.hear(progress)

    def wait(self, seconds: float) -> None:
        """Look at the stage, then sleep for at most ``seconds`` unless the stage has ended; called by a rank in this
        process.
        """
        # This process may know that the stage has ended before it can write that to the state.
        if not self.look() or not self._file.read().ended:
            time.sleep(min(seconds, 0.25))

    def close(self) -> None:
        """Stop leading the stage, if this process leads it, so that another process can take over at once."""
        with suppress(OSError, SharmillError):
            found = self._file.read()
            if self._leader is not None and found.leader == self._id and not self.state.ended:
                self._leader.write(self.state, found, leads=False)

    def outcome(self) -> StageResult:
        """Return the result of the ranks' work; call it only when no rank is left.

        Raises:
            SharmillError: an error has ended the stage, or no usable slot is left.
        """
        self.stage.run_dir.require_not_cancelled()
        paths = self.stage.dir
        with suppress(FileNotFoundError):  # the files may have been removed together with the plan
            self._report()
        if paths.done.exists() and paths.read_token() == self.stage.token:
            # Another process has finished the stage.
            return StageResult()
        require_current(self.stage)
        # Read the notes of all ranks and leaders again: another leader may have seen commits that are not visible here
        # yet.
        notes = StageNotes(self.stage, for_people=False)

        def sees_all() -> bool:
            notes.look()
            return len(notes.missing) <= self.state.num_missing or not self.state.ended

        visibility = VisibilityTimeout(self.stage.options.seconds_until_seen)
        visibility.wait_until(sees_all, f"{self.stage.name}: the notes of all ranks")
        if notes.attempts.stopped is not None:
            raise notes.attempts.stopped
        if self.state.stopped is not None:
            raise self.state.stopped.as_error()
        excluded = notes.attempts.describe_excluded()
        if excluded and not all_given_up(notes.attempts, notes.missing, ()):
            raise notes.attempts.all_excluded_error(self.stage.name, paths.logs)
        failures = {index: notes.attempts.error(index) for index in sorted(notes.missing)}
        return StageResult(failures=failures, given_up=self.given_up or excluded)

    def _report(self) -> None:
        """Read the new notes of all ranks, and report them to the listener."""
        for commit in self.notes.look():
            if commit.index in self._units and self._listener is not None:
                self._listener.unit_done(self._units[commit.index], commit)
        if self._listener is not None:
            self._listener.looked(self.ranks)

    def _is_to_lead(self, found: State) -> bool:
        """Return True if this process leads, or begins to lead because the leader has sent no heartbeat for a lease."""
        now, lease = time.monotonic(), self.stage.options.lease_seconds
        if self._leader is not None and found.leader == self._id:
            return True
        if self._seen != self._file.seen:
            self._seen, self._leads_at = self._file.seen, now + (lease if found.leader else 0.0) + self._delay
        if found.ended or now < self._leads_at:
            return False
        # Only one process can create the file of the next term. If it dies before it writes the state, another process
        # tries the term after that.
        self._leads_at = now + lease + self._delay
        self._term = max(found.term, self._term) + 1
        if not make_claim(self.stage, f"leader.{self._term}", Claim(owner=self._id)):
            return False
        self._leader = Leader(self.stage, self.notes, self._id, self._term)
        # Write the state at once: reading all notes takes a while, and no other process should become leader meanwhile.
        self.state = self._leader.write(found, found)
        return True
