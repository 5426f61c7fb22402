"""Cut the power of small runs at moments drawn from a seed, and relaunch them from what may be left on the disk.

Run by ``make torture``; see ``support/crash_states.py`` for the model of crashes. Exit status 1 if any relaunch ended
in other bytes, or a reader got what was never there; each such crash is printed, and is the same for the same seed.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from support.power import PowerCuts
from support.power_runs import RUNS

# Where files are written fastest.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: drawn, and printed")
    parser.add_argument("--states", type=int, default=1500, help="distinct states to relaunch from, per run")
    parser.add_argument("--minutes", type=float, default=60.0, help="of all runs; an equal share for each")
    parser.add_argument("--runs", nargs="+", choices=[run.name for run in RUNS], help="default: all")
    parser.add_argument("--without", metavar="SITE", help="leave out the fsyncs whose callers have this in their names")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    # What relaunches find there, thousands of times.
    logging.disable(logging.WARNING)
    chosen = [run for run in RUNS if not options.runs or run.name in options.runs]
    failed = False
    print("run | steps | states | readers refused | problems | seconds", flush=True)
    for run in chosen:
        with tempfile.TemporaryDirectory(prefix="sharmill-power-", dir=_MEMORY) as folder:
            began = time.monotonic()
            ends = began + 60 * options.minutes / len(chosen)
            cuts = PowerCuts(run, Path(folder), options.without)
            found = []
            for outcome in islice(cuts.cut_all(options.seed), options.states):
                found.append(outcome)
                if time.monotonic() > ends:
                    break
        problems = {crash: problem for crash, _, problem in found if problem}
        refused = sum(refused for _, refused, _ in found)
        row = (run.name, len(cuts.recording.steps), len(found), refused, len(problems), round(time.monotonic() - began))
        print(*row, sep=" | ", flush=True)
        for crash, problem in problems.items():
            print(f"{run.name}, after step {crash.after}, losses {crash.number}: {problem}", flush=True)
        failed = failed or bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
