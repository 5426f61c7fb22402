"""Heartbeats: each rank process writes what it is doing to a file of its own, at fixed intervals."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from sharmill.engine.host import is_gone, state_and_start, this_kernel
from sharmill.engine.stored import NOT_JSON
from sharmill.errors import ConfigError
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
    """The heartbeat of one rank process: the last that it has said of itself.

    ``owner`` is the random id of the process, and ``slot`` the host with its GPU or core. ``ready`` says that it has
    loaded what it needs.

    Times are Unix seconds by the rank's own clock, which may be minutes from others; ``written`` alone is by that of
    the file system, set when the record is read. ``cost_done`` is the cost of the units done, and ``unit_cost_done``
    what is done of the cost of the unit in flight, whose attempt may take ``unit_limit`` seconds. ``kernel`` and
    ``process_started`` tell if ``pid`` still is this process.
    """

    rank: int
    slot: str
    owner: str
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
    ready: bool = False
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
        return now - self.written > SILENT_SECONDS or self.is_gone()

    def is_gone(self) -> bool:
        """Return True if its process was one of this machine and has ended."""
        return self.kernel == this_kernel() and is_gone(self.pid, self.process_started)


_decoder = msgspec.json.Decoder(RankProgress)


class ProgressWriter:
    """Keeps ``path`` up to date from a thread of its own, so that a long unit does not look like a dead rank."""

    def __init__(self, path: Path, rank: int, slot: str, owner: str, interval: float = INTERVAL_SECONDS) -> None:
        now = time.time()
        self.path = path
        self.last_beat = time.monotonic()
        self._interval = interval
        self.record = RankProgress(
            rank=rank,
            slot=slot,
            owner=owner,
            pid=os.getpid(),
            host=socket.gethostname(),
            started=now,
            kernel=this_kernel(),
            process_started=state_and_start(os.getpid())[1],
        )
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="progress", daemon=True)

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

    def be_ready(self) -> None:
        """Note at once that the rank has loaded what it needs: its supervisor ends ranks that still load."""
        self.record.ready = True
        self._write()

    def begin(self, unit: int, limit: float | None) -> None:
        """Note that an attempt at a unit begins, which may take ``limit`` seconds."""
        self.record.unit = unit
        self.record.unit_limit = limit
        self.record.unit_began = time.time()
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
            self._changed.wait(self._interval)
            self._changed.clear()
            if not self._stop.wait(_LEAST_INTERVAL_SECONDS):
                self._write()

    def _write(self) -> None:
        self.record.updated = time.time()
        self.record.peak_memory_mb = peak_memory_mb()
        if _write_aside(self.path, self.record):
            self.last_beat = time.monotonic()


def peak_memory_mb() -> float:
    """Return the most memory that this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _write_aside(path: Path, record: RankProgress) -> bool:
    """Write a record, and return True if it could be written."""
    aside = path_aside(path)
    try:
        with aside.open("xb") as stream:
            stream.write(msgspec.json.encode(record))
        aside.replace(path)
    except OSError:
        # A full disk is reported by the unit that meets it.
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        return False
    return True


def mark_ended(folder: Path, owners: Container[str] = ()) -> None:
    """Correct the records of ranks that had no chance to say that they end: of these, and of those that are gone."""
    for path, record in _records(folder):
        if not record.ended and (record.owner in owners or record.is_gone()):
            record.ended = True
            record.unit = None
            _write_aside(path, record)


def read_progress(folder: Path) -> list[RankProgress]:
    """Return the progress records of all ranks, in the order of the ranks."""
    return sorted((record for _, record in _records(folder)), key=lambda record: (record.rank, record.started))


def _records(folder: Path) -> Iterator[tuple[Path, RankProgress]]:
    for path in sorted(folder.glob("rank-*.json")):
        # They are not synced to disk: one may be empty after a power cut, gone because a relaunch has begun, or stale
        # on a shared disk. Progress is for people to look at: no such error ends a run.
        with suppress(*NOT_JSON, OSError, ConfigError):
            with open_stored(path) as stream:
                record = _decoder.decode(stream.read(_MAX_BYTES))
                record.written = os.fstat(stream.fileno()).st_mtime
            yield path, record
