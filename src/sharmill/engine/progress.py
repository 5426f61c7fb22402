"""Heartbeats: each rank and driver writes its progress to a file of its own, which all others read."""

import os
import resource
import threading
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from sharmill.errors import ConfigError
from sharmill.files.atomic import temp_path, write_new
from sharmill.files.host import Process
from sharmill.files.stored import NOT_JSON, open_stored

BEATS_PER_LEASE = 8
# A shared file system may show a record to other nodes half a minute later.
SILENT_SECONDS = 60.0

# Plausible bounds on a rank's seconds or megabytes.
_Number = Annotated[float, msgspec.Meta(gt=-1e12, lt=1e12)]


class RankProgress(Process, kw_only=True):
    """The heartbeat of one process, a rank or its driver: the last that it has said of itself.

    ``owner`` is the random id of the process, and ``slot`` the host with its GPU or core; a driver has neither.
    Times are Unix seconds by the rank's own clock, which may be minutes from others; ``written`` alone is by that of
    the file system, set when the record is read. ``ready`` is the time at which a rank had loaded what it needs, 0
    before. ``cost_done`` is the cost of the units done, and ``unit_cost_done``
    what is done of the cost of the unit in flight, whose attempt may take ``unit_limit`` seconds.
    """

    rank: int
    slot: str
    owner: str
    started: _Number
    updated: _Number = 0.0
    unit: int | None = None
    unit_began: _Number = 0.0
    unit_limit: _Number | None = None
    units_done: int = 0
    cost_done: _Number = 0.0
    unit_cost_done: _Number = 0.0
    peak_memory_mb: _Number = 0.0
    ready: _Number = 0.0
    ended: bool = False
    written: float = 0.0

    def is_alive(self, now: float, seconds: float = SILENT_SECONDS) -> bool:
        """Return True if the process has not ended, as far as can be told, and has written in the last ``seconds``.

        ``now`` is by the clock of the file system, as ``written``; a time to come is no heartbeat's.
        """
        return not self.ended and abs(now - self.written) <= seconds and not self.is_known_dead()


class ProgressWriter:
    """Writes heartbeats from a thread of its own, so that a long unit does not look like a dead rank.

    Attributes:
        record: its owner changes it; what changes is written with the next heartbeat.
        last_beat: the time of the last heartbeat that got through, by ``time.monotonic``.
    """

    def __init__(self, path: Path, rank: int = -1, slot: str = "", owner: str = "", *, interval: float) -> None:
        self._path = path
        self._interval = interval
        self.last_beat = time.monotonic()
        self.record = RankProgress.this(rank=rank, slot=slot, owner=owner, started=time.time())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="progress", daemon=True)

    def __enter__(self) -> "ProgressWriter":
        self.write()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self.record.unit = None
        self.record.ended = True
        self.write()

    def write(self) -> None:
        """Write a heartbeat now."""
        self.record.updated = time.time()
        self.record.peak_memory_mb = peak_memory_mb()
        if _write(self._path, self.record):
            self.last_beat = time.monotonic()

    def _keep_writing(self) -> None:
        while not self._stop.wait(self._interval):
            self.write()


def peak_memory_mb() -> float:
    """Return the most memory that this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _write(path: Path, record: RankProgress) -> bool:
    """Write a record, and return True if it could be written; a full disk is reported by the unit that meets it."""
    aside = temp_path(path)
    try:
        write_new(aside, msgspec.json.encode(record))
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        return False
    return True


def mark_ended(folder: Path, owners: Container[str]) -> None:
    """Correct the records of ranks that have ended, and may not have said so."""
    for record in read_progress(folder):
        if not record.ended and record.owner in owners:
            record.ended = True
            record.unit = None
            _write(folder / f"rank-{record.owner}.json", record)


def read_progress(folder: Path, pattern: str = "rank-*.json") -> list[RankProgress]:
    """Return the progress records of all ranks, or of all that match a pattern, in the order of the ranks."""
    records = []
    for path in sorted(folder.glob(pattern)):
        # They are not synced to disk: one may be empty after a power cut, gone because a relaunch has begun, or stale
        # on a shared disk. Progress is for people to look at: no such error ends a run.
        with suppress(*NOT_JSON, OSError, ConfigError):
            with open_stored(path) as stream:
                record = msgspec.json.decode(stream.read(1 << 20), type=RankProgress)
                record.written = os.fstat(stream.fileno()).st_mtime
            records.append(record)
    return sorted(records, key=lambda record: (record.rank, record.started))
