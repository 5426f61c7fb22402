"""Progress records: each rank writes what it is doing to the run directory about every ten seconds."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from sharmill.storage import path_aside

INTERVAL_SECONDS = 10.0


class RankProgress(msgspec.Struct, kw_only=True):
    """One rank's last sign of life. Times are Unix seconds; ``cost_done`` is the cost of the units done, and
    ``unit_cost_done`` what is done of the cost of the unit in flight."""

    rank: int
    pid: int
    host: str
    started: float
    updated: float = 0.0
    unit: int | None = None
    unit_began: float = 0.0
    units_done: int = 0
    cost_done: float = 0.0
    unit_cost_done: float = 0.0
    peak_memory_mb: float = 0.0
    ended: bool = False


_decoder = msgspec.json.Decoder(RankProgress)


class ProgressWriter:
    """Keeps ``path`` up to date from a thread of its own, so that a long unit does not look like a dead rank."""

    def __init__(self, path: Path, rank: int) -> None:
        now = time.time()
        self.path = path
        self.record = RankProgress(rank=rank, pid=os.getpid(), host=socket.gethostname(), started=now)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="progress", daemon=True)

    def __enter__(self) -> ProgressWriter:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self.record.unit = None
        self.record.ended = True
        self._write()

    def begin(self, unit: int) -> None:
        """Note that an attempt at a unit begins."""
        self.record.unit = unit
        self.record.unit_began = time.time()

    def advance(self, done: float) -> None:
        """Note how much of the cost of the unit in flight is done."""
        self.record.unit_cost_done = done

    def give_up(self) -> None:
        """Note that the attempt has failed."""
        self.record.unit = None
        self.record.unit_cost_done = 0.0

    def end(self, cost: float) -> None:
        """Note that the unit, of this cost, is done."""
        self.record.unit = None
        self.record.unit_cost_done = 0.0
        self.record.units_done += 1
        self.record.cost_done += cost

    def _keep_writing(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self._write()

    def _write(self) -> None:
        self.record.updated = time.time()
        self.record.peak_memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        _write_aside(self.path, self.record)


def _write_aside(path: Path, record: RankProgress) -> None:
    aside = path_aside(path)
    try:
        aside.write_bytes(msgspec.json.encode(record))
        aside.replace(path)
    except OSError:
        # Progress is for people to look at: a full disk is reported by the unit that meets it.
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def mark_ended(folder: Path) -> None:
    """Correct the records of ranks that had no chance to say that they end; to be called when none is left."""
    for path, record in _records(folder):
        if not record.ended:
            record.ended = True
            record.unit = None
            _write_aside(path, record)


def forget_progress(folder: Path) -> None:
    """Remove the records of earlier ranks; those that are still at work write theirs anew."""
    for path in folder.glob("rank-*.json"):
        path.unlink(missing_ok=True)


def read_progress(folder: Path) -> list[RankProgress]:
    """Return the progress records of all ranks, in the order of the ranks."""
    return [record for _, record in _records(folder)]


def _records(folder: Path) -> Iterator[tuple[Path, RankProgress]]:
    for path in sorted(folder.glob("rank-*.json")):
        # They are not synced to disk: one may be empty after a power cut, gone because a relaunch has begun, or stale
        # on a shared disk. Progress is for people to look at: no such error ends a run.
        with suppress(msgspec.DecodeError, OSError):
            yield path, _decoder.decode(path.read_bytes())
