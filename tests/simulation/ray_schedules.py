"""Simulate Ray by seed: ``python tests/simulation/ray_schedules.py --seed N``.

``--schedules N`` and ``--minutes M`` go on with the seeds behind it, and ``--twice`` looks whether a seed says all.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fault_rows import FaultRow

from simulation.command import parse_options, run_main, seeds
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
    options = parse_options(__doc__)
    cpu_began = time.process_time()
    row = FaultRow("simulated Ray: all schedules")
    for seed in seeds(options):
        began = time.monotonic()
        problem = describe(seed, trace=options.trace, twice=options.twice)
        ending = "not as they should" if problem else "as they should"
        row.add(ending, time.monotonic() - began, is_equal=not problem, is_problem=bool(problem))
        if problem:
            print(problem, flush=True)
    seconds = time.process_time() - cpu_began
    print(f"{row.times} schedules, {row.problems} with problems, in {seconds:.1f} s of one core "
          f"({60 * row.times / seconds:.0f} a minute)")  # fmt: skip
    return int(row.problems > 0)


if __name__ == "__main__":
    run_main(main)
