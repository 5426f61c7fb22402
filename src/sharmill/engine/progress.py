"""Progress records: each rank writes what it is doing to the run directory about every ten seconds."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from sharmill.engine.stored import NOT_JSON
from sharmill.errors import ConfigError
from sharmill.ports import clock, process
from sharmill.storage import open_stored, path_aside

INTERVAL_SECONDS = 10.0
_MAX_BYTES = 1 << 20
# Seconds or megabytes that no rank can have.
_MAX_NUMBER = 1e12
# Short units follow one another faster than anybody looks.
_LEAST_INTERVAL_SECONDS = 0.5
# A shared file system may show a record to other nodes half a minute later.
SILENT_SECONDS = 60.0


class RankProgress(msgspec.Struct, kw_only=True):
    """One rank's last sign of life.

    Times are Unix seconds by the rank's own clock, which may be minutes from others; ``written`` alone is by that of
    the file system, set when the record is read. ``cost_done`` is the cost of the units done, and ``unit_cost_done``
    what is done of the cost of the unit in flight, whose attempt may take ``unit_limit`` seconds. ``kernel`` and
    ``process_started`` tell if ``pid`` still is this process.
    """

    rank: int
    pid: int
    host: str
    started: float
    updated: float = 0.0
    unit: int | None = None
    unit_began: float = 0.0
    unit_limit: float | None = None
    units_done: int = 0
    cost_done: float = 0.0
    unit_cost_done: float = 0.0
    peak_memory_mb: float = 0.0
    ended: bool = False
    kernel: str = ""
    process_started: int = 0
    written: float = 0.0

    def __post_init__(self) -> None:
        numbers = (
            self.started,
            self.updated,
            self.unit_began,
            self.cost_done,
            self.unit_cost_done,
            self.peak_memory_mb,
            self.unit_limit or 0.0,
        )
        if not all(abs(number) < _MAX_NUMBER for number in numbers):
            raise ValueError("a time or a cost is out of range")

    def is_silent(self, now: float) -> bool:
        """Return True if it is older than a minute, or its process was one of this machine and is gone.

        ``now`` is by the clock of the file system, as ``written``.
        """
        if now - self.written > SILENT_SECONDS:
            return True
        return self.kernel == process.this_kernel() and process.is_gone(self.pid, self.process_started)


_decoder = msgspec.json.Decoder(RankProgress)


class ProgressWriter:
    """Keeps ``path`` up to date from a thread of its own, so that a long unit does not look like a dead rank."""

    def __init__(self, path: Path, rank: int) -> None:
        now = clock.time()
        self.path = path
        self.record = RankProgress(
            rank=rank,
            pid=process.getpid(),
            host=process.gethostname(),
            started=now,
            kernel=process.this_kernel(),
            process_started=process.state_and_start(process.getpid())[1],
        )
        self._stop = process.Event()
        self._changed = process.Event()
        self._thread = process.Thread(target=self._keep_writing, name="progress", daemon=True)

    def __enter__(self) -> ProgressWriter:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._changed.set()
        self._thread.join()
        self.record.unit = None
        self.record.ended = True
        self._write()

    def begin(self, unit: int, limit: float | None) -> None:
        """Note that an attempt at a unit begins, which may take ``limit`` seconds."""
        self.record.unit = unit
        self.record.unit_limit = limit
        self.record.unit_began = clock.time()
        self._changed.set()

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
        self._changed.set()

    def _keep_writing(self) -> None:
        while not self._stop.is_set():
            self._changed.wait(INTERVAL_SECONDS)
            self._changed.clear()
            if not self._stop.wait(_LEAST_INTERVAL_SECONDS):
                self._write()

    def _write(self) -> None:
        self.record.updated = clock.time()
        self.record.peak_memory_mb = peak_memory_mb()
        _write_aside(self.path, self.record)


def peak_memory_mb() -> float:
    """Return the most memory that this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _write_aside(path: Path, record: RankProgress) -> None:
    aside = path_aside(path)
    try:
        with aside.open("xb") as stream:
            stream.write(msgspec.json.encode(record))
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
        with suppress(*NOT_JSON, OSError, ConfigError):
            with open_stored(path) as stream:
                record = _decoder.decode(stream.read(_MAX_BYTES))
                record.written = os.fstat(stream.fileno()).st_mtime
            yield path, record
