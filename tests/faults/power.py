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
_FOLDER = "sharmill/storage.fsync_directory < sharmill/storage."
_WRITTEN = f"{_FOLDER}open_atomic < sharmill/storage.write_atomic < "
_AGAIN = "the same folder, or file, is synced once more before anything relies on it"
_ANEW = "the next run makes it anew"
_GONE = "the next run removes it, or takes it over"
_MARKED = "the same command marks it once more, and nothing reads what is in it"
NOT_NEEDED = {
    "jobs/train_checkpoints.save": _AGAIN,
    "sharmill/storage.fsync_directory < shar/index.changing_index": _GONE,
    f"{_FOLDER}_make_folder < sharmill/storage.make_folder < engine/fence.claim_output": _ANEW,
    f"{_FOLDER}_make_folder < sharmill/storage.make_folder < slurm/executor._submit_stage": _ANEW,
    f"{_FOLDER}_make_folder < sharmill/storage.open_atomic < prepare/stage._merge": _AGAIN,
    f"{_WRITTEN.replace('open_atomic', '_make_folder < sharmill/storage.open_atomic')}encode/stage.finalize": _AGAIN,
    f"{_FOLDER}open_atomic < collect/stage._publish_rejects": _AGAIN,
    f"{_FOLDER}open_atomic < collect/stage._publish_split": _AGAIN,
    f"{_FOLDER}open_atomic < validate/stage.finalize": _AGAIN,
    f"{_WRITTEN}engine/fence.claim_output": _ANEW,
    f"{_WRITTEN}engine/plan.mark_to_begin_anew": _MARKED,
    "sharmill/storage.open_atomic < sharmill/storage.write_atomic < engine/plan.mark_to_begin_anew": _MARKED,
    f"{_WRITTEN}engine/ledger.revoke": "the same report revokes the same units once more",
    f"{_WRITTEN}sharmill/pipeline.run_dataset": _ANEW,
    f"{_WRITTEN}slurm/queue.make_run_id": _AGAIN,
    f"{_WRITTEN}validate/stage.finalize": _AGAIN,
    f"{_WRITTEN}slurm/executor._require_progress": "a round that is forgotten is begun once more",
    f"{_FOLDER}remove_at_once < engine/fence.remove_fences": "no rank outlives the power of its node",
    f"{_FOLDER}remove_at_once < engine/run._finalize": _GONE,
    f"{_FOLDER}remove_at_once < jobs/train_checkpoints.save": "the next save removes old checkpoints once more",
    f"{_FOLDER}remove_for_good < engine/plan.discard_stage": _GONE,
    f"{_FOLDER}remove_for_good < prepare/stage.discard": _ANEW,
    f"{_FOLDER}remove_for_good < shar/dataset.remove": "an index without its files is refused, and written anew",
    f"{_FOLDER}remove_for_good < validate/stage.discard": _ANEW,
    "sharmill/storage.open_atomic < sharmill/storage.write_atomic < sharmill/pipeline.run_dataset": _ANEW,
    "sharmill/storage.open_atomic < sharmill/storage.write_atomic < slurm/executor._require_progress": _ANEW,
    "sharmill/storage.open_atomic < sharmill/storage.write_atomic < slurm/executor.run": "that it is there counts",
}
# Of each place so many states are tried in every run before more are tried in any.
_FEW = 8


_COLUMNS = "run | steps | tried | distinct | journal | POSIX | one node | readers refused | problems | seconds"


def print_row(cuts: Cuts) -> None:
    """Recorded steps, crashes tried, distinct states by model, readers that refused, problems, seconds."""
    states = [cuts.distinct.total(), *(cuts.distinct[model] for model in (JOURNAL, POSIX, NODE))]
    row = (cuts.name, cuts.steps, cuts.tried, *states, cuts.refused, len(cuts.problems), round(cuts.seconds))
    print(" | ".join(map(str, row)), flush=True)


def leave_out_syncs(runs: Sequence[PoweredRun], folder: Path, states: int) -> int:
    """Look for a state that breaks without the fsyncs of each place in turn; return 1 where there is none for one."""
    recorded = {run.name: PowerCuts(run, folder / run.name) for run in runs}
    sites = {site for cuts in recorded.values() for site in cuts.recording.sites}
    left = sorted(sites - NOT_NEEDED.keys())
    wanted, most_tried, num_tried = len(left), 0, 0
    for most, is_mixed in ((0, False), (_FEW, False), (states, False), (states, True)):
        for name, cuts in recorded.items():
            for site in [site for site in left if site in cuts.recording.sites]:
                broken = cuts.break_without(site, most, is_mixed=is_mixed)
                num_tried += broken.tried
                if broken.problem:
                    left.remove(site)
                    most_tried = max(most_tried, broken.tried)
                    first, *_, last = (broken.problem + "\n").split("\n", 1)
                    print(
                        f"{site}: {name}, state {broken.tried}{' of mixed' * is_mixed}: {first[:150]} {last[-150:]}",
                        flush=True,
                    )
    for site in left:
        print(f"{site}: nothing breaks without it")
    for site in sorted(sites & NOT_NEEDED.keys()):
        print(f"{site}: not needed, {NOT_NEEDED[site]}")
    print(f"{num_tried} states, at most {most_tried} of one run until a place was found")
    print(f"{wanted - len(left)} of {wanted} places of fsyncs are needed")
    return int(bool(left))


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
    if not options.replay:
        print(_COLUMNS, flush=True)
    for number, run in enumerate(chosen):
        with tempfile.TemporaryDirectory(prefix="sharmill-power-", dir=_MEMORY) as folder:
            cuts = PowerCuts(run, Path(folder))
            if options.replay:
                print(cuts.cut(options.replay))
                return 0
            now = time.monotonic()
            found.append(cuts.cut_all(options.seed, options.states, now + (ends - now) / (len(chosen) - number)))
        print_row(found[-1])
        for crash, problem in found[-1].problems.items():
            print(f"--runs '{run.name}' --replay {crash}: {problem}", flush=True)
    print(f"{sum(cuts.distinct.total() for cuts in found)} distinct states")
    return int(any(cuts.problems for cuts in found))


if __name__ == "__main__":
    sys.exit(main())
