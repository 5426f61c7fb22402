"""The command line that simulations have in common: which seeds, for how long, in a process whose sets are in order."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator


def parse_options(description: str | None) -> argparse.Namespace:
    """Return the options of a simulation's command."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--trace", action="store_true", help="print all that happens in a schedule with problems")
    parser.add_argument("--twice", action="store_true", help="simulate each twice; a difference is a problem")
    return parser.parse_args()


def is_single(options: argparse.Namespace) -> bool:
    """Return True if the options ask for one seed alone."""
    return options.schedules == 1 or (options.schedules is None and options.minutes is None)


def seeds(options: argparse.Namespace) -> Iterator[int]:
    """Yield the seeds that the options ask for, until the time is over."""
    count = options.schedules or (1 if options.minutes is None else 1 << 60)
    began = time.monotonic()
    for seed in range(options.seed, options.seed + count):
        yield seed
        if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
            return


def run_main(main: Callable[[], int]) -> None:
    """Run the command, in a process where the order of sets, which is a part of what happens, is always the same."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())


def simulate_apart(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, since Python keeps the hook that tells of file operations."""
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    return subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, check=False, env=environment
    )
