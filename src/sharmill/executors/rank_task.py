"""The work of one rank that no driver watches: a task of a SLURM array.

It gets its bin of units when it is submitted and goes through what the ledger lacks of them. Told to leave (preemption,
time limit), it gives up the unit in flight and is requeued, to go on from the ledger.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharmill.engine.attempts import AttemptLog, Attempts
from sharmill.engine.ledger import outputs_in_place, read_ledger
from sharmill.engine.plan import load
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.engine.worker import MAX_ATTEMPTS, Worker
from sharmill.errors import FatalError
from sharmill.executors.logs import logging_to

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

log = logging.getLogger(__name__)


@dataclass
class RankTask:
    """A rank's part of a stage: picklable, and callable on the node. ``units`` are indices into the plan."""

    stage: Stage
    rank: int
    units: list[int]
    device: str

    def __post_init__(self) -> None:
        self._told_to_leave = False
        self._attempts: AttemptLog | None = None
        self._current: int | None = None

    def __call__(self) -> int:
        """Goes through the units and returns how many are in the ledger now."""
        with logging_to(self.stage.dir.rank_log(self.rank)):
            waiting = deque(self._outstanding())
            if waiting:
                _require_device(self.device)
                with Worker(self.stage, self.rank, self.device) as worker:
                    self._work(worker, waiting)
        return len(self.units) - len(self._outstanding())

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit in this process when the rank has to leave; what it returns is run after the requeue."""
        from submitit.helpers import DelayedSubmission

        self._told_to_leave = True
        if self._attempts is not None and self._current is not None:
            self._attempts.give_up(self._current)
            self._current = None
        log.warning("rank %d is told to leave", self.rank)
        # A fresh task: nothing of this process is carried over.
        return DelayedSubmission(RankTask(self.stage, self.rank, self.units, self.device))

    def _work(self, worker: Worker, waiting: deque[Unit]) -> None:
        self._attempts = AttemptLog(self.stage.dir.attempts)
        counts = Attempts(self.stage.dir.attempts).counts
        while waiting:
            unit = waiting.popleft()
            if counts[unit.index] >= MAX_ATTEMPTS:
                continue
            counts[unit.index] += 1
            self._attempts.begin(unit.index)
            self._current = unit.index
            outcome = worker.run(unit)
            if self._told_to_leave:
                # The request to leave arrives as SystemExit within the unit, which ended that unit only.
                sys.exit(1)
            self._current = None
            if not isinstance(outcome, Commit):
                self._attempts.fail(outcome)
                waiting.append(unit)

    def _outstanding(self) -> list[Unit]:
        """What is left of this rank's units, largest first as they were packed."""
        units = load(self.stage)
        mine = [units[index] for index in self.units]
        commits = read_ledger(self.stage.dir.ledger, mine)
        return [u for u in mine if u.index not in commits or not outputs_in_place(commits[u.index], self.stage)]


def _require_device(device: str) -> None:
    if device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise FatalError(
            "this rank should run on a GPU and finds none; correct the cluster profile, or set device: cpu"
        )
