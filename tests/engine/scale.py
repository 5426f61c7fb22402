"""Measure what the loop of ranks asks of the file system: ``python tests/engine/scale.py [UNITS] [RANKS...]``.

Ranks are processes of this machine; units are empty, their commits as large as real ones. Of each number of ranks it
prints seconds, file operations and bytes read a unit, and how many units were done twice.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.toy_stage import ToyStage

from sharmill.engine.claims import Rank
from sharmill.engine.fence import make_fence
from sharmill.engine.ledger import iterate_ledger
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.state import begin_round
from sharmill.engine.unit import Output
from sharmill.engine.work import work

CHANGES = {"os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "create"}


class EmptyStage(ToyStage):
    """Publishes nothing; its commits carry 400 bytes of numbers."""

    def mark(self, name, line=""):
        pass

    def work(self, unit, staging, advance):
        return Output(files=[], num_out=unit.size, stats={f"number_{n}": 0.123456 for n in range(20)})


def run_rank(stage, number):
    """Do units, and leave the counts of this process beside the run."""
    counts: Counter[str] = Counter()

    def count(event, arguments):
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(str(stage.run_dir.path)):
            if not arguments[2] & os.O_CREAT:
                counts["open"] += 1
            else:
                counts["append" if Path(arguments[0]).exists() else "create"] += 1
        elif event.startswith("os."):
            counts[event] += 1

    before = read_bytes()
    sys.addaudithook(count)
    work(stage, Rank(number, f"host{number}/rank {number}", "cpu"))
    counts["bytes"] = read_bytes() - before
    (stage.root / f"counts-{number}.json").write_text(json.dumps(counts))


def read_bytes():
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(num_units, num_ranks):
    with tempfile.TemporaryDirectory(prefix="sharmill-scale-") as folder:
        stage = EmptyStage(Path(folder), units=num_units)
        units = read_or_make_plan(stage, restart=False)
        make_fence(stage)
        begin_round(stage, units, num_ranks)
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=run_rank, args=(stage, number)) for number in range(num_ranks)]
        began = time.monotonic()
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        seconds = time.monotonic() - began
        counts = sum((Counter(json.loads(path.read_text())) for path in stage.root.glob("counts-*")), Counter())
        commits = Counter(commit.index for commit in iterate_ledger(stage.dir))
        size = sum(path.stat().st_size for path in stage.dir.ledger.iterdir())
    assert len(commits) == num_units
    changes = sum(counts[name] for name in CHANGES)
    print(f"{num_ranks} ranks, {num_units} units: {seconds:.1f} s; done twice {commits.total() - num_units}; a unit: "
          f"{changes / num_units:.2f} changes, "
          f"{counts['append'] / num_units:.2f} appends, {counts['open'] / num_units:.1f} opens, "
          f"{counts['os.scandir'] / num_units:.1f} listings, {counts['bytes'] / num_units:,.0f} bytes read of a commit "
          f"of {size / num_units:.0f}; {dict(counts)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    for ranks in [int(argument) for argument in sys.argv[2:]] or [1, 64]:
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5000, ranks)
