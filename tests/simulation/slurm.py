"""Simulate SLURM by seed: ``python tests/simulation/slurm.py --seed N``.

``--schedules N`` and ``--minutes M`` go on with the seeds behind it; ``--twice`` looks whether a seed says all.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fault_rows import FaultRow

from simulation.command import is_single, parse_options, run_main, seeds
from simulation.kernel import make_folder
from simulation.world import Outcome, simulate


def describe(outcome: Outcome, *, trace: bool) -> str:
    """Return lines about a schedule: what was done to it, what did not hold, and all that happened."""
    lines = [f"seed {outcome.seed}: {outcome.state} after {outcome.seconds:.0f} s, {outcome.operations} operations"]
    lines += [f"  disturbance: {text}" for text in outcome.disturbances]
    lines += [f"  PROBLEM: {text}" for text in outcome.problems]
    return "\n".join([*lines, *(outcome.trace if trace else [])])


def count(rows: dict[str, FaultRow], outcome: Outcome, seconds: float) -> None:
    """Count a schedule in the row of each of its disturbances, and in that of all schedules."""
    names = {text.rpartition(" at ")[0] for text in outcome.disturbances}
    for name in ("all schedules", *names):
        row = rows.setdefault(name, FaultRow(f"simulated SLURM: {name}"))
        is_wrong = bool(outcome.problems)
        row.add(f"chains {outcome.state}", seconds, is_equal=not is_wrong, is_problem=is_wrong)


def main() -> int:
    """Simulate, print the schedules in which something did not hold, and return 1 if there were any."""
    options = parse_options(__doc__)
    folder = make_folder()
    cpu_began = time.process_time()
    largest = 0
    rows: dict[str, FaultRow] = {}
    operations = 0
    try:
        for seed in seeds(options):
            began = time.monotonic()
            outcome = simulate(seed, folder)
            if options.twice and simulate(seed, folder).trace != outcome.trace:
                outcome.problems.append("replayed, it goes otherwise")
            count(rows, outcome, time.monotonic() - began)
            operations += outcome.operations
            largest = max(largest, outcome.operations)
            if outcome.problems or is_single(options):
                print(describe(outcome, trace=options.trace or is_single(options)), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds, all_of_them = time.process_time() - cpu_began, rows["all schedules"]
    print(f"{all_of_them.times} schedules, {all_of_them.problems} with problems, {operations} file operations, at most "
          f"{largest} in one, in {seconds:.1f} s of one core ({60 * all_of_them.times / seconds:.0f} a minute); "
          f"{dict(all_of_them.ended)}")  # fmt: skip
    return int(all_of_them.problems > 0)


if __name__ == "__main__":
    run_main(main)
