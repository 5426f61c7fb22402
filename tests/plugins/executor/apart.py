"""An executor as a package of its own brings it: supervisors are started by another Python, which shares nothing."""

import pickle
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

from sharmill.engine.fence import require_current, wait_for_plan
from sharmill.engine.follow import Follower
from sharmill.engine.outcomes import StageResult
from sharmill.engine.patience import Patience
from sharmill.engine.state import driven_round
from sharmill.executors.base import ConfiguredExecutor
from sharmill.executors.devices import Device
from sharmill.executors.supervisor import Supervisor


@dataclass(frozen=True)
class ApartExecutor(ConfiguredExecutor):
    """Ranks below processes of another Python."""

    kind: str = field(default="apart", kw_only=True)
    python: str = sys.executable
    """Python interpreter, or a program that passes its arguments on to one."""

    def run(self, stage, units, listener, unlocked=nullcontext) -> StageResult:
        count = min(len(units), 2 if self.workers == "auto" else self.workers)
        with driven_round(stage, units, count) as numbers:
            follower, processes = Follower(stage, units, listener), []
            with unlocked():
                for number in numbers:
                    process = subprocess.Popen([self.python, "-m", "apart"], stdin=subprocess.PIPE)
                    process.stdin.write(pickle.dumps((stage, number)))
                    process.stdin.close()
                    processes.append(process)
                while any(process.poll() is None for process in processes):
                    follower.look()
                    time.sleep(0.2)
                follower.look()
        return follower.outcome()


def main() -> None:
    stage, number = pickle.load(sys.stdin.buffer)
    wait_for_plan(stage, Patience(stage.seconds_until_seen))
    require_current(stage)
    Supervisor(stage, [Device()], [number], beat_seconds=1.0).run()


if __name__ == "__main__":
    main()
