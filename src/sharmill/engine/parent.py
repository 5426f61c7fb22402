"""A rank as it is started, and what it has of the process that has started it."""

import time
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from sharmill.engine.progress import RankProgress


@dataclass(frozen=True)
class Rank:
    """A rank as it is started.

    Attributes:
        number: that of its bin and of its log; one beyond the bins has none of its own.
        slot: the host with the GPU or core, as ``host/gpu 0``.
        device: ``cpu`` or ``cuda``.
        owner: the random id of the process.
        job_seconds: the time limit of the job that it is in, None where there is none.
        is_replaced: a supervisor starts a fresh process where this one ends.
        most_pause: the most seconds between two looks at the state of a rank that has nothing to do.
    """

    number: int
    slot: str
    device: str
    owner: str = field(default_factory=lambda: uuid4().hex)
    job_seconds: float | None = None
    is_replaced: bool = True
    most_pause: float = 5.0

    def progress(self) -> RankProgress:
        """Return the record of its progress at its start, in its process."""
        return RankProgress.this(rank=self.number, slot=self.slot, owner=self.owner, started=time.time())


class Parent(Protocol):
    """The process that has started a rank, as the rank has it: it need not look at files to see how the rank does.

    Attributes:
        interval: seconds between two tellings at most.
    """

    interval: float

    def tell(self, progress: RankProgress) -> object:
        """Tell how the rank does; called from its threads, and never waits."""

    def wait(self, seconds: float) -> object:
        """Wait until the state of the stage may have changed, for so long at most."""
