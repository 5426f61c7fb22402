"""All faults one after the other, and one table of them: what ``make torture`` runs.

Each kind is a script of its own, which writes its rows and can be run by itself. What one finds does not keep the
others from running: exit status 1 at the end if any of them did not end with 0. A limit of time is shared out, and what
a script leaves of its part is for those behind it.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.fault_rows import FaultRow, format_rows, read_rows
from support.paths import TESTS

TABLE = "table.md"


@dataclass(frozen=True)
class Kind:
    """A script that meets one kind of fault.

    Attributes:
        counts: its options that say how often, which are handed on.
        share: of a limit of time, relative to those of the others.
    """

    name: str
    script: str
    counts: tuple[str, ...]
    share: float


# Those that keep to their time first.
KINDS = (
    Kind("fuzz", "security/fuzz.py", ("rounds",), 1),
    Kind("slurm", "simulation/slurm.py", ("schedules",), 2),
    Kind("ray", "simulation/ray_schedules.py", ("schedules",), 1),
    Kind("power", "faults/power.py", ("states",), 5),
    Kind("kills", "faults/kills_and_disk.py", ("kills", "every"), 5),
    Kind("shared", "faults/shared.py", ("runs",), 6),
)


def run_all(kinds: Sequence[Kind], options: argparse.Namespace, output: Path) -> tuple[list[FaultRow], list[str]]:
    """Run the scripts; return the rows of all, and what is to be said of those that did not end with status 0."""
    rows, complaints = [], []
    modules = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    ends = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    for number, kind in enumerate(kinds):
        path = output / f"{kind.name}.jsonl"
        path.unlink(missing_ok=True)
        command = [sys.executable, str(TESTS / kind.script), "--seed", str(options.seed), "--rows", str(path)]
        for name in kind.counts:
            if (value := getattr(options, name)) is not None:
                command += [f"--{name}", str(value)]
        if kind.name == "kills":
            command += ["--output", str(output)]
        if ends is not None:
            left = max(0.0, ends - time.monotonic()) / 60
            command += ["--minutes", str(left * kind.share / sum(later.share for later in kinds[number:]))]
        print(f"== {kind.name}: {' '.join(command[1:])}", flush=True)
        status = subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": modules}).returncode
        if path.exists():
            rows += read_rows(path)
        if status:
            complaints.append(f"{kind.name} ended with status {status}" + ("" if path.exists() else ", without rows"))
    return rows, complaints


def main() -> int:
    names = [kind.name for kind in KINDS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: drawn, and printed")
    parser.add_argument("--minutes", type=float, help="of all kinds; default: what each script does without a limit")
    parser.add_argument("--output", type=Path, default=Path("torture"), help=f"folder of the rows, notes and {TABLE}")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--rounds", type=int, help="changed inputs")
    parser.add_argument("--runs", type=int, help="of each fault of a shared disk, and of each delay")
    parser.add_argument("--states", type=int, help="in which a loss of power leaves a disk, of each run")
    parser.add_argument("--kills", type=int, help="that hit, in each stage")
    parser.add_argument("--every", type=int, help="a fault of the disk at every n-th operation")
    parser.add_argument("--schedules", type=int, default=20_000, help="of each simulated cluster")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}", flush=True)
    began = time.monotonic()
    rows, complaints = run_all([kind for kind in KINDS if kind.name in options.only], options, options.output)
    minutes = (time.monotonic() - began) / 60
    said = [
        f"Seed {options.seed}, {minutes:.0f} minutes.",
        "",
        format_rows(rows),
        *(f"\n{line}" for line in complaints),
    ]
    text = "\n".join(said) + "\n"
    (options.output / TABLE).write_text(text)
    print(text + f"in {options.output / TABLE}")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
