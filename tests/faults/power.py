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
from pathlib import Path

from support.crash_states import JOURNAL, POSIX, Crash
from support.disk import FaultyDisk
from support.power import Cuts, PowerCuts
from support.power_runs import RUNS

# Where files are written fastest.
_MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


def print_table(found: list[Cuts]) -> None:
    """Per run: recorded steps, crashes tried, distinct states by model, readers that refused, problems."""
    print("run | steps | crashes tried | distinct states | of journals | of POSIX alone | readers refused | problems")
    for cuts in found:
        states = [cuts.distinct.total(), cuts.distinct[JOURNAL], cuts.distinct[POSIX]]
        print(" | ".join(map(str, (cuts.name, cuts.steps, cuts.tried, *states, cuts.refused, len(cuts.problems)))))
    print(f"{sum(cuts.distinct.total() for cuts in found)} distinct states")


def print_syncs(run: str, cuts: PowerCuts, states: int, needed: dict[str, str]) -> None:
    """Look for a state that breaks without the fsyncs of each site; those that were needed in an earlier run are."""
    for site in cuts.recording.sites:
        if not needed.get(site):
            needed[site] = cuts.break_without(site, states)
            how = needed[site].splitlines()
            print(f"{run}: {site}: {how[0][:200] + ' ... ' + how[-1][:200] if how else 'nothing breaks'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: drawn, and printed")
    parser.add_argument("--states", type=int, default=1500, help="distinct states to relaunch from, per run")
    parser.add_argument("--minutes", type=float, default=60.0, help="of all runs; an equal share for each")
    parser.add_argument("--runs", nargs="+", choices=[run.name for run in RUNS], help="default: all")
    parser.add_argument("--without-syncs", action="store_true", help="leave out the fsyncs of each site in turn")
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
    ends = time.monotonic() + 60 * options.minutes
    found = []
    needed: dict[str, str] = {}
    for number, run in enumerate(chosen):
        with tempfile.TemporaryDirectory(prefix="sharmill-power-", dir=_MEMORY) as folder:
            cuts = PowerCuts(run, Path(folder))
            if options.replay:
                print(cuts.cut(options.replay))
                return 0
            if options.without_syncs:
                print_syncs(run.name, cuts, options.states, needed)
                continue
            now = time.monotonic()
            found.append(cuts.cut_all(options.seed, options.states, now + (ends - now) / (len(chosen) - number)))
        for crash, problem in found[-1].problems.items():
            print(f"--runs {run.name} --replay {crash}: {problem}", flush=True)
    if options.without_syncs:
        print(f"{sum(map(bool, needed.values()))} of {len(needed)} sites of fsyncs are needed, not:")
        print("\n".join(site for site in sorted(needed) if not needed[site]))
        return 0
    print_table(found)
    return int(any(cuts.problems for cuts in found))


if __name__ == "__main__":
    sys.exit(main())
