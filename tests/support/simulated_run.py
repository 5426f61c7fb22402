"""A run of a toy stage on simulated hosts: drivers, ranks, and what became of the units."""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from sharmill.engine.attempts import Attempts, Note
from sharmill.engine.claims import Rank
from sharmill.engine.follow import Follower
from sharmill.engine.ledger import iterate_ledger
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.run import Unlocked, locked, run_stage
from sharmill.engine.stage import Advance
from sharmill.engine.state import driven_round
from sharmill.engine.unit import Commit, Output, Unit
from sharmill.engine.work import Replace, work
from sharmill.errors import SharmillError
from sharmill.files.staging import Staging, token_staging
from sharmill.files.storage import checksum
from support.shared_disk import Host, SharedDisk
from support.toy_stage import ToyStage

log = logging.getLogger(__name__)

MOST_SECONDS = 1800.0
SECONDS_BETWEEN_LOOKS = 3.0


class SimulatedStage(ToyStage):
    """Takes some seconds over a unit; fails with bad units, and on hosts that are not good any more."""

    seconds_until_seen = 60.0
    bad_units: frozenset[int] = frozenset()

    def mark(self, name: str, line: str = "") -> None:
        pass

    def work(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        host = SharedDisk.running.host
        time.sleep(5.0 * unit.cost)
        host.good_for -= 1
        if unit.index in self.bad_units or host.good_for < 0:
            raise ValueError("a bad day")
        names = [f"first/{unit.index:06d}.txt", f"last/{unit.index:06d}.txt"]
        for name in names:
            staging.path(name).write_text(name)
        return Output(files=names, num_out=unit.size)


@dataclass
class Run:
    """Drivers of one stage, and the ranks that the first of them starts.

    Args:
        disk: where all of it takes place.
        stage: is to be done.
        ranks: their hosts, named as their slots.
        delays: seconds until each is there.
    """

    waits: ClassVar[bool] = True
    disk: SharedDisk
    stage: SimulatedStage
    ranks: Sequence[Host]
    delays: Sequence[float]
    results: list[StageResult] = field(default_factory=list)
    started: list[Any] = field(default_factory=list)
    finished: dict[Path, tuple[int, int]] = field(default_factory=dict)
    finished_at: float = math.inf
    next_look: float = 0.0

    def drive(self) -> None:
        """Do the stage, or what is left of it, as soon as no other driver does."""
        stage = pickle.loads(pickle.dumps(self.stage))
        with locked(stage.run_dir, wait_seconds=MOST_SECONDS) as lock:
            result = run_stage(stage, self, Listener(), max_reject_fraction=1.0, unlocked=lock.released)
            self.results.append(result)

    def run(self, stage: Any, units: Sequence[Unit], listener: Listener, unlocked: Unlocked) -> StageResult:
        """Do the units, as an executor. Who joins another driver brings no ranks, and follows those of the other."""
        self.stage.token = stage.token
        with driven_round(stage, units, len(self.ranks), join_seconds=stage.lease_seconds) as numbers:
            if not numbers.start:
                self.started += [
                    self.disk.start(host, partial(self._work, pickle.dumps(stage), number, host), delay)
                    for number, (host, delay) in enumerate(zip(self.ranks, self.delays, strict=True))
                ]
            follower = Follower(stage, units, listener)
            left = MOST_SECONDS
            with unlocked():
                while not follower.look() and left > 0.0:
                    time.sleep(5.0)
                    if all(rank.is_done for rank in self.started):
                        left = min(left, stage.seconds_until_seen) - 5.0
        return follower.outcome()

    def _work(self, stage: bytes, number: int, host: Host) -> None:
        """Run a rank, as its supervisor."""
        while True:
            try:
                work(pickle.loads(stage), Rank(number, host.name, "cpu"))
            except Replace:
                continue
            except SharmillError as error:
                log.info("%s", error)
            except FileNotFoundError:
                # Its folders go when the stage is finished.
                if self.disk.kind(token_staging(self.stage.root, self.stage.token)):
                    raise
            return

    def look(self) -> None:
        """Take note of the files of the stage when it is finished, and look at the commits every few seconds."""
        if not self.finished and self.stage.dir.done.exists():
            self.finished, self.finished_at = self.outcome_files(), self.disk.now
        if self.stage.token and self.disk.now >= self.next_look:
            self.next_look = self.disk.now + SECONDS_BETWEEN_LOOKS
            self.commits()

    def outcome_files(self) -> dict[Path, tuple[int, int]]:
        """Return the inode and the time of all files that a finished stage leaves for others."""
        paths = list(self.stage.root.glob("[!.]*/*"))
        paths += [path for path in (self.stage.root / "merged.txt", self.stage.dir.done) if path.exists()]
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}

    def commits(self) -> dict[int, list[Commit]]:
        """Return all commits of each unit; of each, all files are in their places."""
        found = defaultdict(list)
        for commit in iterate_ledger(self.stage.dir):
            found[commit.index].append(commit)
            for file in commit.files:
                path = self.stage.root / file.name
                assert path.exists(), "a unit is committed before it is published"
                assert checksum(path) == file.xxh3, "a committed file has other bytes"
        return found

    def begun(self) -> Counter[tuple[int, int]]:
        """Return how many attempts have begun, by the unit and the generation of the claim."""
        lines = [line for path in self.stage.dir.attempts.glob("*.jsonl") for line in path.read_bytes().splitlines()]
        notes = [msgspec.json.decode(line, type=Note) for line in lines]
        return Counter((note.unit, note.generation) for note in notes if note.kind == "begun")

    def attempts(self) -> Attempts:
        """Return the attempts at all units."""
        return Attempts(self.stage.dir.attempts)


def simulate(
    folder: Path,
    ranks: Sequence[Host],
    delays: Sequence[float] = (),
    *,
    units: int,
    bad_units: frozenset[int] = frozenset(),
    late: float = 0.0,
    seed: int = 0,
    drivers: Sequence[float] = (0.0,),
) -> Run:
    """Run a stage on simulated hosts, and return the run when all but the dead ranks have come to their ends.

    Args:
        drivers: seconds until each of the drivers, all on one host, begins.
    """
    shared, aside = folder / "shared", folder / "aside"
    shared.mkdir()
    aside.mkdir()
    stage = SimulatedStage(shared, units=units)
    stage.bad_units = bad_units
    with SharedDisk(shared, aside, seed, late) as disk:
        run = Run(disk, stage, ranks, delays or [0.0] * len(ranks))
        host = Host("driver")
        for delay in drivers:
            disk.start(host, run.drive, delay)
        disk.run(MOST_SECONDS, run.look)
    return run
