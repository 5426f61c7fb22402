"""The local executor: the process of the run supervises ranks on this machine, or is the only one itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sharmill.engine.child import variable
from sharmill.engine.claims import Rank
from sharmill.engine.follow import Follower
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.engine.work import work
from sharmill.executors.base import ConfiguredExecutor
from sharmill.executors.devices import VISIBLE, Device, plan_devices, usable_gpus
from sharmill.executors.logs import logging_to
from sharmill.executors.supervisor import Supervisor
from sharmill.files.host import usable_cores


@dataclass(frozen=True)
class LocalExecutor(ConfiguredExecutor):
    """Runs a stage on ``workers`` ranks of this machine (a number, or ``auto``), on GPUs as ``device`` says."""

    runs_here: ClassVar[bool] = True

    def require_devices(self, stages: Iterable[Stage]) -> None:
        if any(stage.resource == "gpu" for stage in stages):
            usable_gpus(self.device)

    def num_ranks(self, stage: Stage, units: Sequence[Unit]) -> int:
        return len(self._devices(stage))

    def supervise(self, stage: Stage, numbers: Sequence[int], follower: Follower) -> None:
        devices = self._devices(stage)[: len(numbers)]
        # A device may break its process, and a time limit kills it.
        has_limit = isinstance(stage.unit_time_limit, float | int)
        is_inline = str(self.workers) == "1" and devices[0].kind == "cpu" and not has_limit
        with logging_to(stage.dir.rank_log(numbers[0]) if is_inline else stage.dir.driver_log):
            follower.look()
            if is_inline:
                rank = Rank(numbers[0], devices[0].slot(numbers[0]), "cpu", is_replaced=False, beat_seconds=1.0)
                # The next stage of this process may use the GPUs that this one must not see.
                with variable(VISIBLE, ""):
                    work(stage, rank, follower.look)
            else:
                Supervisor(stage, devices, numbers, beat_seconds=1.0).run(follower.look)

    def _devices(self, stage: Stage) -> list[Device]:
        uses_gpu = stage.resource == "gpu"
        gpus = usable_gpus(self.device) if uses_gpu else ()
        return plan_devices(self.workers, uses_gpu=uses_gpu, gpus=gpus, cores=usable_cores())


class JoiningExecutor(LocalExecutor):
    """Adds ranks of this machine to a run that was begun elsewhere."""

    goes_on: ClassVar[bool] = True
