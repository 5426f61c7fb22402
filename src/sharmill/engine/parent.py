"""The parameters of a rank, and its interface to the process that has started it."""

import time
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from sharmill.engine.progress import RankProgress


@dataclass(frozen=True)
class Rank:
    """The parameters with which a rank is started.

    Attributes:
        number: the number of the rank, and also of its bin and its log. A rank whose number is beyond the last bin has
            no bin of its own.
        slot: the host with the GPU or core, such as ``host/gpu 0``.
        device: ``cpu`` or ``cuda``.
        owner: the random id of the process.
        job_seconds: the time limit of its job, None if there is none.
        is_replaced: True if a supervisor replaces this process with a fresh one when it ends.
        most_pause: the longest time between two looks at the state while the rank is idle, in seconds.
    """

    number: int
    slot: str
    device: str
    owner: str = field(default_factory=lambda: uuid4().hex)
    job_seconds: float | None = None
    is_replaced: bool = True
    most_pause: float = 5.0

    def progress(self) -> RankProgress:
        """Return the initial progress of the rank; called in the process of the rank."""
        return RankProgress.this(rank=self.number, slot=self.slot, owner=self.owner, started=time.time())


class Parent(Protocol):
    """Interface of a rank to the process that has started it, which receives the rank's progress without reading files.

    Attributes:
        interval: the longest time between two calls of ``tell``, in seconds.
    """

    interval: float

    def tell(self, progress: RankProgress) -> object:
        """Report the progress of the rank. This is called from several threads, and never blocks."""

    def wait(self, seconds: float) -> object:
        """Wait until the state of the stage may have changed, but for at most ``seconds``."""
