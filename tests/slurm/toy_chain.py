"""A chain over a toy stage; importable in the jobs of the cluster, where it is unpickled."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from toy_stage import ToyStage

from sharmill.chain import Chain, LogListener
from sharmill.engine.run import locked, run_stage
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Output, Unit
from sharmill.pipeline import DatasetResult
from sharmill.store import Staging


class SleepyStage(ToyStage):
    """Takes its time over every unit. Once set up it cannot be pickled, as stages with a model in them."""

    def __init__(self, *arguments: Any, seconds: float = 0.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seconds = seconds

    def setup(self, device: str) -> None:
        super().setup(device)
        self.model = threading.Lock()

    def process(self, unit: Unit, staging: Staging) -> Output:
        self.mark("begun", str(unit.index))
        if not (self.marks / "hurry").exists():
            time.sleep(self.seconds)
        return super().process(unit, staging)

    def begun(self) -> Counter[int]:
        """How often each unit was begun."""
        return Counter(int(line) for line in self.marked("begun"))

    def redone(self) -> int:
        """How many attempts there were beyond one a unit."""
        return sum(self.begun().values()) - len(self.begun())


@dataclass(frozen=True)
class ToyChain(Chain):
    stage: SleepyStage | None = None

    def _make_stages(self) -> list[Stage]:
        assert self.stage is not None
        return [self.stage]

    def _run_dataset(self, wait_seconds: float) -> DatasetResult:
        assert self.stage is not None
        with locked(self.run_dir, wait_seconds):
            result = run_stage(
                self.stage, self._executor(), LogListener(), max_reject_fraction=0.5, restart=self.restart
            )
        return DatasetResult(self.config, [(self.stage, result)])
