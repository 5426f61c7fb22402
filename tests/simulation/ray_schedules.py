"""Simulate Ray by seed: ``python tests/simulation/ray_schedules.py --seed N``.

``--schedules N`` and ``--minutes M`` go on with the seeds behind it, ``--twice`` looks whether a seed says all, and
``--defects`` puts one defect after the other back, and looks whether schedules find it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.ray_defects import DEFECTS, find_defect
from simulation.ray_world import Broken, run_schedule


def describe(seed: int, *, trace: bool, twice: bool) -> str:
    """Run a schedule, and return what does not hold in it; with ``trace`` all that happens too."""
    try:
        world = run_schedule(seed)
    except Broken as error:
        return str(error) if trace else str(error).partition("\n")[0]
    if twice and run_schedule(seed).kernel.trace != world.kernel.trace:
        return f"seed {seed}: replayed, it goes otherwise"
    if trace:
        print("\n".join(world.kernel.trace))
    return ""


def main() -> int:
    """Simulate, print the schedules in which something did not hold, and return 1 if there were any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--trace", action="store_true", help="print all that happens")
    parser.add_argument("--twice", action="store_true", help="simulate each twice; a difference is a problem")
    parser.add_argument("--defects", action="store_true", help="put defects back, and look whether they are found")
    options = parser.parse_args()
    if options.defects:
        found = {name: find_defect(defect) for name, defect in DEFECTS.items()}
        for name, says in found.items():
            print(f"{name}: {says or 'NOT FOUND'}")
        return int(not all(found.values()))
    count = options.schedules or (1 if options.minutes is None else 1 << 60)
    began, cpu_began = time.monotonic(), time.process_time()
    done = failed = 0
    for seed in range(options.seed, options.seed + count):
        problem = describe(seed, trace=options.trace, twice=options.twice)
        done += 1
        failed += bool(problem)
        if problem:
            print(problem, flush=True)
        if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
            break
    seconds = time.process_time() - cpu_began
    print(f"{done} schedules, {failed} with problems, in {seconds:.1f} s of one core "
          f"({60 * done / seconds:.0f} a minute)")  # fmt: skip
    return int(failed > 0)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets is a part of what happens.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
