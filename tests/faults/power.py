"""Cut the power of small runs at moments drawn from a seed, and relaunch them from what may be left on the disk.

Run by ``make torture``; see ``support/crash_states.py`` for the model of crashes. Exit status 1 if any relaunch ended
in other bytes, or a reader got what was never there; each such crash is printed with the options that replay it.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from support.crash_states import JOURNAL, NODE, POSIX, Crash
from support.disk import FaultyDisk
from support.power import Cuts, PowerCuts, PoweredRun
from support.power_runs import RUNS

# Where files are written fastest.
_MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


# Places of fsyncs without which nothing breaks, and why they are there.
NOT_NEEDED: dict[str, str] = {}
# Of each place so many states are tried in every run before more are tried in any.
_FEW = 8


def print_table(found: list[Cuts]) -> None:
    """Per run: recorded steps, crashes tried, distinct states by model, readers that refused, problems, seconds."""
    print("run | steps | tried | distinct | journal | POSIX | one node | readers refused | problems | seconds")
    for cuts in found:
        states = [cuts.distinct.total(), *(cuts.distinct[model] for model in (JOURNAL, POSIX, NODE))]
        row = (cuts.name, cuts.steps, cuts.tried, *states, cuts.refused, len(cuts.problems), round(cuts.seconds))
        print(" | ".join(map(str, row)))
    print(f"{sum(cuts.distinct.total() for cuts in found)} distinct states")


def leave_out_syncs(runs: Sequence[PoweredRun], folder: Path, states: int) -> int:
    """Look for a state that breaks without the fsyncs of each place in turn; return 1 where there is none for one."""
    recorded = [(run.name, PowerCuts(run, folder / run.name)) for run in runs]
    breaks: dict[str, str] = {}
    for most in (_FEW, states):
        for name, cuts in recorded:
            for site in cuts.recording.sites:
                if site not in NOT_NEEDED and not breaks.get(site):
                    found = cuts.break_without(site, most).splitlines()
                    breaks[site] = f"{name}: {found[0][:150]} ... {found[-1][-150:]}" if found else ""
    for site in sorted(breaks):
        print(f"{site}: {breaks[site] or 'nothing breaks without it'}")
    print(f"{sum(map(bool, breaks.values()))} of {len(breaks)} places of fsyncs are needed")
    return int(not all(breaks.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: drawn, and printed")
    parser.add_argument("--states", type=int, default=1500, help="distinct states to relaunch from, per run")
    parser.add_argument("--minutes", type=float, default=60.0, help="of all runs; an equal share for each")
    parser.add_argument("--runs", nargs="+", choices=[run.name for run in RUNS], help="default: all")
    parser.add_argument("--without-syncs", action="store_true", help="leave out the fsyncs of each place in turn")
    parser.add_argument("--replay", type=Crash.parse, help="one crash of the only run that is named")
    options = parser.parse_args()
    if not hasattr(ctypes.CDLL(None), "record_disk"):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | FaultyDisk(Path(folder)).environment()
            return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
    print(f"seed {options.seed}", flush=True)
    # What relaunches find there, thousands of times.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    chosen = [run for run in RUNS if not options.runs or run.name in options.runs]
    if options.without_syncs:
        with tempfile.TemporaryDirectory(prefix="sharmill-power-", dir=_MEMORY) as folder:
            return leave_out_syncs(chosen, Path(folder), options.states)
    ends = time.monotonic() + 60 * options.minutes
    found = []
    for number, run in enumerate(chosen):
        with tempfile.TemporaryDirectory(prefix="sharmill-power-", dir=_MEMORY) as folder:
            cuts = PowerCuts(run, Path(folder))
            if options.replay:
                print(cuts.cut(options.replay))
                return 0
            now = time.monotonic()
            found.append(cuts.cut_all(options.seed, options.states, now + (ends - now) / (len(chosen) - number)))
        print(f"{run.name}: {found[-1].distinct.total()} distinct states, {round(found[-1].seconds)} s", flush=True)
        for crash, problem in found[-1].problems.items():
            print(f"--runs '{run.name}' --replay {crash}: {problem}", flush=True)
    print_table(found)
    return int(any(cuts.problems for cuts in found))


if __name__ == "__main__":
    sys.exit(main())
