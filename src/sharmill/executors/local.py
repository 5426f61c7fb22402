"""The local executor: the process of the run supervises ranks on this machine, or is the only one itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

from sharmill.engine.child import variable
from sharmill.engine.fence import is_current
from sharmill.engine.follow import Follower
from sharmill.engine.host import usable_cores
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import Finished
from sharmill.engine.progress import mark_ended
from sharmill.engine.run import Unlocked
from sharmill.engine.stage import Stage
from sharmill.engine.state import begin_round, end_round
from sharmill.engine.unit import Unit
from sharmill.engine.work import Rank, work
from sharmill.errors import FatalError
from sharmill.executors.devices import VISIBLE, Device, plan_devices, usable_gpus
from sharmill.executors.logs import logging_to
from sharmill.executors.supervisor import Supervisor
from sharmill.staging import remove_dead_attempts


@dataclass(frozen=True)
class LocalExecutor:
    """Runs a stage on ``workers`` ranks of this machine (a number, or ``auto``), on GPUs as ``device`` says.

    With ``goes_on``, attempts of ranks that have ended before count on.
    """

    workers: int | str = "auto"
    device: str = "auto"
    goes_on: bool = False
    waits: ClassVar[bool] = True

    def require_devices(self, stages: Iterable[Stage]) -> None:
        """Raise ConfigError where a stage is to run on GPUs, and none can be used."""
        if any(stage.uses_gpu for stage in stages):
            usable_gpus(self.device)

    def run(
        self, stage: Stage, units: Sequence[Unit], listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> Finished:  # fmt: skip
        """Do the units; see ``engine.run.Executor``."""
        gpus = usable_gpus(self.device) if stage.uses_gpu else ()
        cores = usable_cores()
        devices = plan_devices(self.workers, uses_gpu=stage.uses_gpu, gpus=gpus, cores=cores)[: len(units)]
        numbers = begin_round(stage, units, len(devices), goes_on=self.goes_on)
        follower = Follower(stage, units, listener)
        devices = devices[: len(numbers)]
        # One rank may be this process itself, but for a device that may break it and a time limit, which kills ranks.
        has_limit = isinstance(stage.unit_time_limit, float | int)
        is_inline = str(self.workers) == "1" and devices[0].kind == "cpu" and not has_limit
        try:
            with unlocked():
                follower.look()
                if is_inline:
                    _work_inline(stage, numbers[0], devices[0], follower)
                else:
                    with logging_to(stage.dir.driver_log):
                        Supervisor(stage, devices, numbers, beat_seconds=1.0).run(follower.look)
        except (FatalError, FileNotFoundError):
            # Another process may have finished the stage, or begun it anew.
            if is_current(stage):
                raise
        finally:
            end_round(stage)
            # No rank is left that could do it for itself.
            remove_dead_attempts(stage.root, stage.token)
            mark_ended(stage.dir.progress)
        return follower.outcome()


def _work_inline(stage: Stage, number: int, device: Device, follower: Follower) -> None:
    rank = Rank(number, device.slot(number), device.kind, is_replaced=False, beat_seconds=1.0)
    # The next stage of this process may use the GPUs that this one must not see.
    with variable(VISIBLE, device.visible), logging_to(stage.dir.rank_log(number)):
        work(stage, rank, follower.look)
