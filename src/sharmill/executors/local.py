"""The local executor: the process of the run supervises ranks on this machine, or is the only one itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

from sharmill.engine.child import variable
from sharmill.engine.claims import Rank
from sharmill.engine.follow import Follower
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.run import Unlocked
from sharmill.engine.stage import Stage
from sharmill.engine.state import driven_round
from sharmill.engine.unit import Unit
from sharmill.engine.work import work
from sharmill.executors.base import ConfiguredExecutor
from sharmill.executors.devices import VISIBLE, plan_devices, usable_gpus
from sharmill.executors.logs import logging_to
from sharmill.executors.supervisor import Supervisor
from sharmill.files.host import usable_cores


@dataclass(frozen=True)
class LocalExecutor(ConfiguredExecutor):
    """Runs a stage on ``workers`` ranks of this machine (a number, or ``auto``), on GPUs as ``device`` says.

    Attributes:
        goes_on: attempts of ranks that have ended before count on.
    """

    runs_here: ClassVar[bool] = True
    goes_on: ClassVar[bool] = False

    def require_devices(self, stages: Iterable[Stage]) -> None:
        if any(stage.resource == "gpu" for stage in stages):
            usable_gpus(self.device)

    def run(
        self, stage: Stage, units: Sequence[Unit], listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> StageResult:  # fmt: skip
        gpus = usable_gpus(self.device) if stage.resource == "gpu" else ()
        cores = usable_cores()
        devices = plan_devices(self.workers, uses_gpu=stage.resource == "gpu", gpus=gpus, cores=cores)[: len(units)]
        with driven_round(stage, units, len(devices), goes_on=self.goes_on) as numbers:
            follower = Follower(stage, units, listener)
            devices = devices[: len(numbers)]
            # A device may break its process, and a time limit kills it.
            has_limit = isinstance(stage.unit_time_limit, float | int)
            is_inline = str(self.workers) == "1" and devices[0].kind == "cpu" and not has_limit
            log_file = stage.dir.rank_log(numbers[0]) if is_inline else stage.dir.driver_log
            with unlocked(), logging_to(log_file):
                follower.look()
                if is_inline:
                    rank = Rank(numbers[0], devices[0].slot(numbers[0]), "cpu", is_replaced=False, beat_seconds=1.0)
                    # The next stage of this process may use the GPUs that this one must not see.
                    with variable(VISIBLE, ""):
                        work(stage, rank, follower.look)
                else:
                    Supervisor(stage, devices, numbers, beat_seconds=1.0).run(follower.look)
        return follower.outcome()


class JoiningExecutor(LocalExecutor):
    """Adds ranks of this machine to a run that was begun elsewhere."""

    goes_on: ClassVar[bool] = True
