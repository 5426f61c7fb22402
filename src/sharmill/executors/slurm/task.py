"""The work of one rank: a task of a SLURM array, which is a supervisor of one rank.

Told to leave (preemption, time limit), its rank gives the unit in flight back, and the task is requeued, to go on.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharmill.engine.fence import is_current, superseded
from sharmill.engine.host import limit_cores
from sharmill.engine.late_views import wait_for_plan
from sharmill.engine.patience import Patience
from sharmill.engine.stage import Stage
from sharmill.engine.state import StageState
from sharmill.errors import FatalError
from sharmill.executors.devices import Device
from sharmill.executors.logs import logging_to
from sharmill.executors.signals import Terminated, ended_by_sigterm
from sharmill.executors.slurm.queue import scancel
from sharmill.executors.supervisor import Supervisor

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

log = logging.getLogger(__name__)


@dataclass
class RankTask:
    """A rank of a stage: picklable, and callable on the node. ``limit`` is the time of its job in seconds."""

    stage: Stage
    rank: int
    device: str
    limit: float = math.inf

    def __call__(self) -> int:
        """Do units until the stage has ended, and return how many are missing then."""
        stage = self.stage
        wait_for_plan(stage, Patience(stage.seconds_until_seen))
        if not is_current(stage):
            return self._leave()
        if (cores := os.environ.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
            # A cluster need not bind tasks to their cores.
            limit_cores(int(cores))
        supervisor = Supervisor(
            stage, [Device.given(self.device)], [self.rank], job_seconds=self.limit, join_seconds=stage.lease_seconds
        )
        with logging_to(stage.dir.driver_log):
            try:
                with ended_by_sigterm():
                    supervisor.run()
            except Terminated:
                log.warning("rank %d will be killed", self.rank)
                sys.exit(128 + signal.SIGTERM)
            except FatalError:
                if is_current(stage):
                    raise
        if not is_current(stage):
            return self._leave()
        state = StageState(stage)
        state.look()
        if not state.missing or state.attempts.stopped() is not None:
            if (array := os.environ.get("SLURM_ARRAY_JOB_ID")) is not None:
                # The advance job behind the array would wait until each had its turn, to find nothing left.
                scancel([array], "--state=PENDING")
        elif supervisor.error is not None:
            raise supervisor.error
        return len(state.missing)

    def _leave(self) -> int:
        """Leave work that others have finished, or begun anew: that is no failure of this rank."""
        log.warning("rank %d is overtaken: %s", self.rank, superseded(self.stage))
        return 0

    def checkpoint(self) -> DelayedSubmission:
        """Return what is run after the requeue; submitit calls this when the task has to leave, and ends it then."""
        from submitit.helpers import DelayedSubmission

        log.warning("rank %d is told to leave", self.rank)
        # A fresh task: nothing of this process is carried over.
        return DelayedSubmission(dataclasses.replace(self))
