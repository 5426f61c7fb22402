"""An executor whose supervisors are processes of another Python, as in a container: only the disk is shared."""

import pickle
import subprocess
import sys
import time
from dataclasses import dataclass, field

from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Unit
from sharmill.engine.watch import Watcher
from sharmill.executors.local import ConfiguredExecutor
from sharmill.executors.supervisor import Device, supervise_rank


@dataclass(frozen=True)
class ApartExecutor(ConfiguredExecutor):
    """Ranks below processes of another Python."""

    kind: str = field(default="apart", kw_only=True)
    python: str = sys.executable
    """Python interpreter, or a program that passes its arguments on to one."""

    def num_ranks(self, stage: StageRun, units: list[Unit]) -> int:
        return 2 if self.workers == "auto" else self.workers

    def supervise(self, stage: StageRun, numbers: range, watcher: Watcher) -> None:
        processes = [subprocess.Popen([self.python, "-m", "apart"], stdin=subprocess.PIPE) for _ in numbers]
        for process, number in zip(processes, numbers, strict=True):
            with process.stdin as stream:
                stream.write(pickle.dumps((stage, number)))
        for process in processes:
            while process.poll() is None:
                watcher.look()
                time.sleep(0.2)


if __name__ == "__main__":
    stage, number = pickle.load(sys.stdin.buffer)
    supervise_rank(stage, Device(), number, beat_seconds=1.0)
