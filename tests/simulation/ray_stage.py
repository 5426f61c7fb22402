"""The stage that schedules of the Ray executor run; what its units meet with is the affair of the world around it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import DeviceError
from sharmill.manifest import Reject
from sharmill.ports import clock
from sharmill.staging import Staging

if TYPE_CHECKING:
    from simulation.ray_world import World

RECORDS_PER_UNIT = 3
UNIT_TIME_LIMITS: tuple[float | Literal["auto"] | None, ...] = (300.0, "auto")
_COSTS = (2.0, 5.0, 20.0, 60.0)

# The one that runs, if there is one: a stage is pickled on its way to its ranks.
worlds: list[World] = []


class SimStage(Stage):
    """Writes two files a unit, in simulated time. ``does`` says by unit what it meets with: it ``raises``, ``kills``
    its rank, ``hangs`` or ``takes its node down``, every time."""

    kind: ClassVar[str] = "simulated"

    def __init__(self, folder: Path, units: int, option: int, does: dict[int, str]) -> None:
        self.run_dir = RunDir(folder / "run")
        self.root = folder / "out"
        self.folders = ("first", "last")
        self.units, self.option, self.does = units, option, does

    def identity(self) -> dict[str, Any]:
        return {"option": self.option}

    def plan(self, folder: Path) -> Iterator[Unit]:
        for index in range(self.units):
            yield make_unit(index, cost=_COSTS[index % len(_COSTS)], size=RECORDS_PER_UNIT, params={})

    def check_node(self) -> None:
        if worlds[-1].is_blind():
            raise DeviceError("this node does not see the audio", place="a node", code="unlike_nodes")

    def open(self, device: str) -> Processor:
        clock.sleep(worlds[-1].kernel.random.uniform(1.0, 20.0))
        worlds[-1].use_gpu()
        return SimProcessor(self)

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        return add_up(commits)

    def discard(self) -> None:
        for name in self.folders:
            shutil.rmtree(self.root / name, ignore_errors=True)

    def names(self, index: int) -> list[str]:
        return [f"first/{index:06d}.txt", f"last/{index:06d}.txt"]

    def content(self, index: int) -> bytes:
        return f"unit {index} of option {self.option}\n".encode()


class GpuStage(SimStage):
    uses_gpu = True


@dataclass
class SimProcessor(Processor):
    stage: SimStage

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        world, stage = worlds[-1], self.stage
        world.count_attempt(unit.index)
        first, last = stage.names(unit.index)
        staging.path(first).write_bytes(stage.content(unit.index))
        clock.sleep(unit.cost * world.kernel.random.uniform(0.5, 2.0))
        world.use_gpu()
        world.meet(stage.does.get(unit.index, ""))
        if world.is_blind():
            rejects = [Reject(stage.name, "missing_audio", "no such file", {})] * unit.size
            return Output(files=[], num_out=0, rejects=rejects)
        staging.path(last).write_bytes(stage.content(unit.index))
        return Output(files=[first, last], num_out=unit.size)
