"""Run the small pipeline on nodes that see a shared disk late, or meet what NFS and Lustre answer there, and relaunch.

Run by ``make torture``; ``support/shared_disk.c`` says which model of a shared disk it is. Each run is drawn from the
seed and its number alone. Exit status 1 if any did not end with the bytes of an undisturbed run, or not in one line.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from support.disk import compiled
from support.shared_nodes import SharedDisk, SharedOutcome, SharedRuns

# Where files are written fastest.
_MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
# Seconds that a busy machine may take beside those that it is late.
_PATIENCE = 20.0
# About as many operations need room in a run.
_MOST_OPERATIONS = 700
_WITHOUT_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

# From seconds of lateness and a source of chance.
FAULTS: dict[str, Callable[[float, random.Random], SharedDisk]] = {
    "seen late": lambda late, rng: SharedDisk(late=late),
    "seen late, ESTALE until then": lambda late, rng: SharedDisk(late=late, stale=True),
    "seen late, open files become .nfs files": lambda late, rng: SharedDisk(late=late, silly=True),
    "seen late, flock holds on one node only": lambda late, rng: SharedDisk(late=late, flock=0),
    "seen late, flock fails (ENOLCK, EOPNOTSUPP, ENOSYS)": lambda late, rng: SharedDisk(
        late=late, flock=rng.choice(_WITHOUT_FLOCK)
    ),
    "seen late, clocks minutes apart": lambda late, rng: SharedDisk(late=late, clocks=rng.uniform(-600, 600)),
    "EDQUOT from one operation on": lambda late, rng: SharedDisk(quota=rng.randint(1, _MOST_OPERATIONS)),
}


def print_table(found: dict[str, list[SharedOutcome]], usual: int) -> None:
    """Per fault: runs, how they ended, rounds of ranks beyond the usual ones, units done again, problems."""
    print("fault | runs | ended well | one line, then relaunched | rounds too many | redone | bytes equal | problems")
    for name, outcomes in found.items():
        undisturbed = [outcome for outcome in outcomes if not outcome.relaunches]
        cells = (
            name, len(outcomes), len(undisturbed), len(outcomes) - len(undisturbed),
            sum(outcome.rounds - usual for outcome in undisturbed), sum(outcome.redone for outcome in undisturbed),
            sum(outcome.same_bytes for outcome in outcomes), sum(len(outcome.problems) for outcome in outcomes),
        )  # fmt: skip
        print(" | ".join(map(str, cells)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: drawn, and printed")
    parser.add_argument("--runs", type=int, default=20, help="of each fault")
    parser.add_argument("--minutes", type=float, default=60.0, help="of all; rounds over the faults end then")
    parser.add_argument("--late", type=float, nargs="+", default=[2.0, 4.0, 8.0], help="seconds, one of which is drawn")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="default: all")
    parser.add_argument("--first", type=int, default=0, help="number of the first run, to repeat one")
    options = parser.parse_args()
    if not hasattr(ctypes.CDLL(None), "become_node"):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"LD_PRELOAD": str(compiled("shared_disk.c", Path(folder)))}
            return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
    print(f"seed {options.seed}", flush=True)
    ends = time.monotonic() + 60 * options.minutes
    found: dict[str, list[SharedOutcome]] = {name: [] for name in options.faults}
    with tempfile.TemporaryDirectory(prefix="sharmill-shared-", dir=_MEMORY) as folder:
        runs = SharedRuns(Path(folder), seconds_until_seen=_PATIENCE)
        for number in range(options.first, options.first + options.runs):
            for name in options.faults:
                if time.monotonic() > ends and found[name]:
                    continue
                rng = random.Random(f"{options.seed} {name} {number}")
                disk = FAULTS[name](rng.choice(options.late), rng)
                found[name].append(outcome := runs.run(disk, rng.randrange(1 << 31)))
                print(f"{name} {number}: {outcome}", flush=True)
    print_table(found, runs.usual.rounds)
    return int(any(outcome.problems for outcomes in found.values() for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
