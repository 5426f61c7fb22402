"""Run the small pipeline on nodes that see a shared disk late, or meet what NFS and Lustre answer there, and relaunch.

Run by ``make torture``; ``support/shared_disk.c`` says which model of a shared disk it is. Each run is drawn from the
seed, its fault and number alone. Exit status 1 if any did not end with the bytes of an undisturbed run, or not in one
line.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from support.disk import compiled
from support.fault_rows import FaultRow, format_rows, write_rows
from support.shared_nodes import (
    APPENDS,
    LISTINGS,
    NEW_NAMES,
    REMOVALS,
    RENAMES,
    SharedDisk,
    SharedOutcome,
    SharedRuns,
)

# Where files are written fastest.
_MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
# Seconds that a busy machine may take beside those that it is late.
_PATIENCE = 20.0
# About as many operations need room in a run, and a quota is tried in each of so many parts of them.
_MOST_OPERATIONS = 700
_QUOTAS = 12
# Of each delay.
_COMBINATIONS = 6

# What comes late, by name; tried with each delay.
_LATE = {
    "new files seen late": SharedDisk(kinds=NEW_NAMES),
    "renames seen late": SharedDisk(kinds=RENAMES),
    "removals and appended lines seen late": SharedDisk(kinds=REMOVALS | APPENDS),
    "listings late, names known": SharedDisk(kinds=LISTINGS),
    "all seen late": SharedDisk(),
    "all seen late, ESTALE until then": SharedDisk(stale=True),
    "all seen late, open files become .nfs files": SharedDisk(silly=True),
}
# Tried without a delay, and with each.
_LOCKS = {
    "flock fails with ENOLCK": errno.ENOLCK,
    "flock fails with EOPNOTSUPP": errno.EOPNOTSUPP,
    "flock fails with ENOSYS": errno.ENOSYS,
    "flock holds on one node only": 0,
}
_CLOCKS = {"clocks of ranks minutes ahead": 1, "clocks of ranks minutes behind": -1}
_QUOTA = "EDQUOT from one operation on"
_SEVERAL = "several of these at once"
FAULTS = (*_LATE, *_LOCKS, *_CLOCKS, _QUOTA, _SEVERAL)


@dataclass(frozen=True)
class Case:
    """One run: the fault as the table names it, its number among those of that fault, and the disk."""

    fault: str
    number: int
    disk: SharedDisk
    seed: int


def plan(seed: int, rounds: int, delays: Sequence[float]) -> Iterator[Case]:
    """Yield the runs: those of the first delay first, so that where time is short no fault is left out."""
    counts: Counter[str] = Counter()
    for number in range(rounds):
        for late in (delays[0], 0.0, *delays[1:]):
            draws = random.Random(f"{seed} {number} {late}")
            for fault, disk in _faults(late, draws):
                yield Case(fault, counts[fault], disk, draws.randrange(1 << 31))
                counts[fault] += 1


def _faults(late: float, draws: random.Random) -> Iterator[tuple[str, SharedDisk]]:
    """Yield the faults of one delay, or those without any where it is 0."""
    for name, error in _LOCKS.items():
        yield name, SharedDisk(late=late, flock=error)
    for name, sign in _CLOCKS.items():
        yield name, SharedDisk(late=late, clocks=sign * draws.uniform(60.0, 600.0))
    if not late:
        for part in range(_QUOTAS):
            yield _QUOTA, SharedDisk(quota=1 + int((part + draws.random()) * _MOST_OPERATIONS / _QUOTAS))
        return
    for name, disk in _LATE.items():
        yield name, replace(disk, late=late)
    for _ in range(_COMBINATIONS):
        yield _SEVERAL, _combine(late, draws)


def _combine(late: float, draws: random.Random) -> SharedDisk:
    """Return a disk of which some changes are late, and that has one to four more faults."""
    changes: dict[str, Any] = {
        "flock": draws.choice(list(_LOCKS.values())), "clocks": draws.uniform(-600.0, 600.0), "stale": True,
        "silly": True, "quota": draws.randint(1, _MOST_OPERATIONS),
    }  # fmt: skip
    chosen = draws.sample(sorted(changes), draws.randint(1, 4))
    kinds = draws.choice(list(_LATE.values())).kinds
    return SharedDisk(late=late, kinds=kinds, **{name: changes[name] for name in chosen})


_runs: list[SharedRuns] = []


def prepare(folder: Path) -> None:
    """Make the undisturbed run of this process, and of no other, which its runs are compared with."""
    _runs.append(SharedRuns(Path(tempfile.mkdtemp(dir=folder)), seconds_until_seen=_PATIENCE))


def run(case: Case, ends: float) -> SharedOutcome | None:
    """Run a case; return None where the time is over."""
    if time.monotonic() > ends:
        return None
    outcome = _runs[0].run(case.disk, case.seed)
    print(f"{case.fault} {case.number}: {outcome}", flush=True)
    return outcome


def describe(found: Sequence[tuple[Case, SharedOutcome]]) -> Iterator[FaultRow]:
    """Yield the row of each fault that was tried."""
    for fault in FAULTS:
        outcomes = [outcome for case, outcome in found if case.fault == fault]
        delays = sorted(Counter(outcome.disk.late for outcome in outcomes).items())
        of_delays = ", ".join(f"{count} at {late:g} s" for late, count in delays)
        row = FaultRow(f"{fault} ({of_delays})" if any(late for late, _ in delays) else fault)
        for outcome in outcomes:
            row.add(_ending(outcome), outcome.seconds, is_equal=outcome.same_bytes, is_problem=bool(outcome.problems))
        # After an error they are done again with good reason.
        row.ended["units done twice"] = sum(outcome.redone for outcome in outcomes if not outcome.relaunches)
        if outcomes:
            yield row


def _ending(outcome: SharedOutcome) -> str:
    if outcome.problems:
        return "not as they should"
    return "with one line, and well when launched again" if outcome.relaunches else "well"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: drawn, and printed")
    parser.add_argument("--runs", type=int, default=2, help="of each fault and delay")
    parser.add_argument("--minutes", type=float, default=60.0, help="of all; no run begins after that")
    parser.add_argument("--late", type=float, nargs="+", default=[2.0, 4.0, 8.0], help="delays in seconds")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, help="default: all")
    parser.add_argument("--number", type=int, help="only the run of this number of each fault, to repeat it")
    parser.add_argument("--parallel", type=int, default=4, help="runs at a time, which mostly wait")
    parser.add_argument("--rows", type=Path, help="file for the rows of the table")
    options = parser.parse_args()
    if not hasattr(ctypes.CDLL(None), "become_node"):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"LD_PRELOAD": str(compiled("shared_disk.c", Path(folder)))}
            return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
    print(f"seed {options.seed}", flush=True)
    ends = time.monotonic() + 60 * options.minutes
    cases = [
        case
        for case in plan(options.seed, options.runs, options.late)
        if case.fault in options.faults and options.number in (None, case.number)
    ]
    with tempfile.TemporaryDirectory(prefix="sharmill-shared-", dir=_MEMORY) as folder:
        forks = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(options.parallel, forks, prepare, (Path(folder),)) as pool:
            outcomes = list(pool.map(run, cases, repeat(ends)))
    found = [(case, outcome) for case, outcome in zip(cases, outcomes, strict=True) if outcome is not None]
    rows = list(describe(found))
    write_rows(options.rows, rows)
    print(format_rows(rows))
    if len(found) < len(cases):
        print(f"the minutes were over after {len(found)} of {len(cases)} runs")
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
