"""Long runs of what tests/faults does briefly: kills at random moments, and a fault at every n-th operation on disk.

Run by ``make torture``. Each case is drawn from the seed and its number alone, and noted in ``OUTPUT`` when it is
over: the same command goes on where it stopped. Exit status 1 if any case went wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from support.disk import KINDS, FaultyDisk, relaunch, trouble
from support.fault_rows import FaultRow, format_rows, write_rows
from support.kills import VICTIMS, torture
from support.small_run import STAGES, SmallRun

_MAX_KILLS_A_RUN = 3
# By exit status.
_ENDINGS = {0: "well", 1: "with one line", 2: "with one line", -9: "killed"}


class Notes:
    """The cases that are over, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.cases: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def add(self, case: dict[str, Any]) -> None:
        with self._path.open("a") as stream:
            stream.write(json.dumps(case) + "\n")
        self.cases.append(case)
        print(json.dumps(case), flush=True)

    def of(self, **values: Any) -> list[dict[str, Any]]:
        """The cases that have these values."""
        return [case for case in self.cases if all(case[key] == value for key, value in values.items())]


class Clock:
    """A limit on the time of all parts, each of which gets an equal share of what is left when it begins.

    Args:
        minutes: of all parts; None is no limit.
        parts: how many there are.
    """

    def __init__(self, minutes: float | None, parts: int) -> None:
        self._ends = None if minutes is None else time.monotonic() + 60 * minutes
        self._left = parts
        self._deadline = math.inf
        self.cut_short: list[str] = []

    def begin(self, part: str) -> None:
        """Begin the next part."""
        self._part = part
        if self._ends is not None:
            now = time.monotonic()
            self._deadline = now + (self._ends - now) / self._left
        self._left -= 1

    def is_over(self) -> bool:
        """Return True if the part has had its share; it is noted as cut short then."""
        if time.monotonic() < self._deadline:
            return False
        if self._part not in self.cut_short:
            self.cut_short.append(self._part)
        return True


def kill_runs(run: Callable[[], SmallRun], stage: str, seed: int, kills: int, notes: Notes, clock: Clock) -> None:
    """Tortures runs of a stage until ``kills`` kills have hit."""
    while (
        hits := sum(len(case["kills"]) for case in notes.of(stage=stage, seed=seed))
    ) < kills and not clock.is_over():
        number = len(notes.of(stage=stage, seed=seed))
        rng = random.Random(f"{seed} {stage} {number}")
        victims = rng.choices(VICTIMS, k=min(rng.randint(1, _MAX_KILLS_A_RUN), kills - hits))
        began = time.monotonic()
        try:
            found = asdict(torture(run(), stage, victims, rng))
        except AssertionError as error:
            found = {"stage": stage, "kills": victims, "relaunches": 0, "redone": 0, "differences": [str(error)]}
        notes.add({"seed": seed, "number": number, **found, "seconds": time.monotonic() - began})


def disk_runs(run: Callable[[], SmallRun], stage: str, seed: int, every: int, notes: Notes, clock: Clock) -> None:
    """One run for each kind of fault and each ``every``-th operation on disk, begun at a place drawn from the seed.

    In rounds over the kinds of faults, so that a limit of time leaves none out.
    """
    if clock.is_over():
        return
    with tempfile.TemporaryDirectory(prefix="sharmill-disk-") as folder:
        disk = FaultyDisk(Path(folder))
        places = []
        for kind in KINDS:
            operations = disk.count(run(), stage, kind)
            first = random.Random(f"{seed} {stage} {kind}").randint(1, min(every, operations))
            places.append([(kind, at) for at in range(first, operations + 1, every)])
        for kind, at in filter(None, chain.from_iterable(zip_longest(*places))):
            if notes.of(stage=stage, seed=seed, kind=kind, at=at):
                continue
            if clock.is_over():
                return
            began = time.monotonic()
            run().restore(stage)
            found = trouble(disk, run(), stage, kind, at)
            found.problems += relaunch(run(), stage)
            notes.add({"seed": seed, **asdict(found), "seconds": time.monotonic() - began})


def describe_kills(cases: list[dict[str, Any]]) -> Iterator[FaultRow]:
    """Yield the row of each stage's runs that were killed."""
    for stage in STAGES:
        own = [case for case in cases if case["stage"] == stage]
        kills = [victim for case in own for victim in case["kills"]]
        ended = Counter({f"kills of {victim}s": kills.count(victim) for victim in VICTIMS})
        ended["relaunches"] = sum(case["relaunches"] for case in own)
        ended["units done again"] = sum(case["redone"] for case in own)
        wrong = sum(bool(case["differences"]) for case in own)
        yield FaultRow(f"SIGKILL in {stage}", len(own), ended, len(own) - wrong, wrong, _seconds(own))


def describe_faults(cases: list[dict[str, Any]]) -> Iterator[FaultRow]:
    """Yield the row of each kind of fault of the disk, over all stages."""
    for kind, message in KINDS.items():
        own = [case for case in cases if case["kind"] == kind]
        ended = Counter(_ENDINGS[case["status"]] for case in own if case["status"] in _ENDINGS)
        wrong = sum(bool(case["problems"]) for case in own)
        name = f"disk: {kind} ({message})" if message else f"disk: {kind} at an operation"
        yield FaultRow(name, len(own), ended, len(own) - wrong, wrong, _seconds(own))


def _seconds(cases: list[dict[str, Any]]) -> float:
    return sum(case["seconds"] for case in cases)


@contextmanager
def small_run() -> Iterator[Callable[[], SmallRun]]:
    """Makes the run when it is first asked for."""
    made: list[SmallRun] = []

    def make() -> SmallRun:
        if not made:
            made.append(SmallRun(Path(folder)))
        return made[0]

    with tempfile.TemporaryDirectory(prefix="sharmill-torture-") as folder:
        yield make


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="default: drawn, and printed")
    parser.add_argument("--kills", type=int, default=40, help="kills that have to hit, per stage")
    parser.add_argument("--every", type=int, default=25, help="a fault at every n-th operation on disk")
    parser.add_argument("--minutes", type=float, help="default: until all is done; else an equal share for each stage")
    parser.add_argument("--only", choices=("kills", "disk"), help="default: both")
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--output", type=Path, default=Path("torture"), help="folder of the notes")
    parser.add_argument("--rows", type=Path, help="file for the rows of the table of all faults")
    options = parser.parse_args()
    print(f"seed {options.seed}; to go on: --seed {options.seed} --output {options.output}", flush=True)
    kills, faults = Notes(options.output / "kills.jsonl"), Notes(options.output / "disk.jsonl")
    clock = Clock(options.minutes, len(options.stages) * (1 if options.only else 2))
    with small_run() as run:
        for stage in options.stages:
            if options.only != "disk":
                clock.begin(f"kills in {stage}")
                kill_runs(run, stage, options.seed, options.kills, kills, clock)
            if options.only != "kills":
                clock.begin(f"faults in {stage}")
                disk_runs(run, stage, options.seed, options.every, faults, clock)
    rows = [*describe_kills(kills.of(seed=options.seed)), *describe_faults(faults.of(seed=options.seed))]
    write_rows(options.rows, rows)
    print(format_rows(rows))
    if clock.cut_short:
        print(f"the minutes were over in {', '.join(clock.cut_short)}; the same command goes on there")
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
