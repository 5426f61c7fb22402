"""The state of a running stage: the decisions of its leader, in one small file that all other processes read."""

from pathlib import Path

import msgspec

from sharmill.engine.run_dir import StoredError
from sharmill.files.stored import load_record


class Offer(msgspec.Struct, kw_only=True):
    """A unit to be tried again: the generation of its next claim, and the slots that must not claim it."""

    generation: int
    avoid: list[str] = []


class State(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The decisions of the leader of a stage.

    Attributes:
        leader: the random id of the leader, "" if there is none.
        term: number of leaders so far; see ``Watcher``.
        num_missing: number of units without a commit.
        offers: the units to be tried again; units with the fewest failures come first.
        out: excluded slots and hosts.
        stopped: the error that ends the stage for all ranks.
        ended: True if no work is left for any rank, because each unit is committed or given up, or because the stage
            has stopped.
    """

    leader: str = ""
    term: int = 0
    num_missing: int = 0
    offers: dict[int, Offer] = {}
    out: list[str] = []
    stopped: StoredError | None = None
    ended: bool = False


class StateFile:
    """Reader of the state for one process; reads the file only if it has changed.

    Attributes:
        state: the state that was read last.
        seen: a value that changes with every new content and every heartbeat of the leader.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.state = State()
        self.seen: tuple[int, int] | None = None

    def read(self) -> State:
        """Return the state, which is read again if its file has changed.

        Raises:
            FileNotFoundError: the state was removed together with the plan.
        """
        status = self._path.stat()
        seen = status.st_ino, status.st_mtime_ns
        if seen != self.seen:
            self.state = load_record(self._path, State)
            self.seen = seen
        return self.state
