"""The local executor: a supervisor on this machine, and one rank on the CPU in the process of the run itself."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import ClassVar

from sharmill.engine.attempts import MAX_FAILURES
from sharmill.engine.child import ChildEnded, ChildProcess, describe_exit
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
from sharmill.executors.devices import Device, plan_devices, usable_gpus
from sharmill.executors.logs import logging_to
from sharmill.executors.signals import deferred_interrupts
from sharmill.executors.supervisor import slot_of, supervise
from sharmill.staging import remove_dead_attempts

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 0.25
_LOOKING_SHARE = 20.0
# The supervisor gives its ranks two seconds to leave.
_SECONDS_TO_END = 4.0


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
        try:
            with unlocked():
                follower.look()
                is_exact = isinstance(stage.unit_time_limit, float | int)
                # A time limit ends the rank, and an error of a GPU does: that must not be this process then.
                if len(numbers) == 1 and devices[0].kind == "cpu" and not is_exact:
                    _run_inline(stage, numbers[0], devices[0], follower)
                else:
                    _run_supervised(stage, numbers, devices[: len(numbers)], follower)
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


def _run_inline(stage: Stage, number: int, device: Device, follower: Follower) -> None:
    rank = Rank(number, slot_of(number, device), device.kind, is_replaced=False, beat_seconds=1.0)
    with device.only_visible(), logging_to(stage.dir.rank_log(number)):
        work(stage, rank, follower.look)


def _run_supervised(stage: Stage, numbers: Sequence[int], devices: Sequence[Device], follower: Follower) -> None:
    """Run a supervisor until the stage has ended; one that is killed is started again."""
    for _ in range(MAX_FAILURES):
        # An interrupt would leave a process that nobody knows of.
        with deferred_interrupts():
            arguments = (pickle.dumps(stage), numbers, devices, stage.dir.driver_log)
            child = ChildProcess(supervise, *arguments, name="sharmill-supervisor", daemon=False)
        try:
            seconds = 0.0
            while child.is_alive():
                # Looking takes a small part of the time, also where the disk is slow.
                child.join(max(_SECONDS_BETWEEN_LOOKS, _LOOKING_SHARE * seconds))
                began = time.monotonic()
                follower.look()
                seconds = time.monotonic() - began
            with suppress(ChildEnded, TimeoutError):
                raise child.receive(0.0)
        finally:
            with deferred_interrupts():
                child.end(_SECONDS_TO_END)
        if child.exitcode == 0:
            return
        log.warning("the supervisor %s", describe_exit(child.exitcode))
    raise FatalError(
        f"{stage.name}: the process that starts the ranks {describe_exit(child.exitcode)}; see {stage.dir.driver_log}",
        code="no_ranks",
    )
