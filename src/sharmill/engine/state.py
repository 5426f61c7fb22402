"""The state of a stage at work: what its leader has decided, in one small file that all others look at."""

from pathlib import Path

import msgspec

from sharmill.engine.run_dir import StoredError
from sharmill.files.stored import load_record


class Offer(msgspec.Struct, kw_only=True):
    """A unit that is to be tried again: the generation of the claim on it, and the slots that are to leave it."""

    generation: int
    avoid: list[str] = []


class State(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The decisions of the leader of a stage.

    Attributes:
        leader: its random id, "" where there is none.
        term: how many leaders there were; see ``Watcher``.
        num_missing: how many units are not committed.
        offers: the units that are to be tried again, those that have failed least often first.
        out: slots and hosts that are taken out of work.
        stopped: the error that ends the stage for all ranks.
        ended: no rank can do anything more: each unit is committed or given up, or the stage is stopped.
    """

    leader: str = ""
    term: int = 0
    num_missing: int = 0
    offers: dict[int, Offer] = {}
    out: list[str] = []
    stopped: StoredError | None = None
    ended: bool = False


class StateFile:
    """The state as one process sees it, which reads it when it has changed.

    Attributes:
        state: as it was read last.
        seen: tells one content or heartbeat of the leader from the next.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.state = State()
        self.seen: tuple[int, int] | None = None

    def read(self) -> State:
        """Return the state.

        Raises:
            FileNotFoundError: it has gone with the plan.
        """
        status = self._path.stat()
        seen = status.st_ino, status.st_mtime_ns
        if seen != self.seen:
            self.state = load_record(self._path, State)
            self.seen = seen
        return self.state
