"""Jobs of a simulated SLURM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sharmill.executors.slurm.scheduler import JobRequest
from simulation.tasks import SimProcess

_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
State = Literal["PENDING", "RUNNING", "COMPLETING", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"]


@dataclass(eq=False)
class SimJob:
    """A job, or a task of an array.

    Attributes:
        dependency: what it waits for, as sbatch has it.
        turn: tells its present run from those before a requeue.
        countdown: how often it may still be requeued for its time limit.
        second: the same process once more, where a node has started it twice.
    """

    id: str
    number: int
    request: JobRequest
    payload: bytes
    state: State = "PENDING"
    restarts: int = 0
    turn: int = 0
    is_scheduled: bool = False
    countdown: int = 0
    node: str = ""
    is_requeued: bool = False
    dependency: str = ""
    process: SimProcess | None = None
    second: SimProcess | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        return self.request.parameters

    @property
    def comment(self) -> str:
        return str(self.parameters["additional_parameters"]["comment"])

    @property
    def role(self) -> str:
        return self.comment.split(":")[2]

    @property
    def limit(self) -> float:
        return float(self.parameters["time"]) * 60.0

    @property
    def is_over(self) -> bool:
        return self.state in _ENDED
