"""Heartbeats: each rank and driver has a file with its progress, whose name changes with every heartbeat.

The name is ``<kind>-<owner>.<beat>.<size>.json``: how often the process has given a heartbeat, ``ended`` at last, and
the size of its log. So one listing of the folder tells who is alive and whose log has grown, however many there are.
"""

import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from sharmill.errors import ConfigError
from sharmill.files.atomic import write_new
from sharmill.files.host import Process
from sharmill.files.stored import NOT_JSON, open_stored

BEATS_PER_LEASE = 6
# A shared file system may show a record to other nodes half a minute later.
SILENT_SECONDS = 60.0
ENDED = "ended"

# Plausible bounds on a rank's seconds or megabytes.
_Number = Annotated[float, msgspec.Meta(gt=-1e12, lt=1e12)]


class RankProgress(Process, kw_only=True):
    """The progress of one process, a rank or its driver: the last that it has said of itself.

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
    generation: int = 0
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


class Heartbeat(NamedTuple):
    """The name of a process's file: its ``beat``, or ``ended``, and how many bytes its log had."""

    file: str
    owner: str
    beat: str
    size: int

    @property
    def has_ended(self) -> bool:
        return self.beat == ENDED


def list_heartbeats(folder: Path, kind: str = "rank") -> dict[str, Heartbeat]:
    """Return the last heartbeats of all processes of a kind, by their owners; it takes one listing."""
    found: dict[str, Heartbeat] = {}
    for file in sorted(path.name for path in folder.iterdir()):
        name, _, rest = file.partition(".")
        beat, _, size = rest.removesuffix(".json").partition(".")
        if not (name.startswith(f"{kind}-") and size.isdecimal() and (beat.isdecimal() or beat == ENDED)):
            continue
        heartbeat = Heartbeat(file, name.removeprefix(f"{kind}-"), beat, int(size))
        # One that was taken for dead, and goes on, has two. It has ended if it has none but such.
        before = found.get(heartbeat.owner)
        if before is None or _order(before) < _order(heartbeat):
            found[heartbeat.owner] = heartbeat
    return found


def _order(heartbeat: Heartbeat) -> tuple[int, int]:
    return -1 if heartbeat.has_ended else int(heartbeat.beat), heartbeat.size


class ProgressWriter:
    """Gives heartbeats from a thread of its own, so that a long unit does not look like a dead rank.

    Args:
        folder: that of all heartbeats of the stage.
        interval: seconds between two of them at most.
        tell: gets the record every ``tell_interval`` seconds, for those who watch this process alone.

    Attributes:
        record: its owner changes it; what changes is written with the next heartbeat.
    """

    def __init__(
        self, folder: Path, record: RankProgress, *, interval: float,
        tell: Callable[[RankProgress], object] = lambda record: None, tell_interval: float = math.inf,
        kind: str = "rank",
    ) -> None:  # fmt: skip
        self.record = record
        self._folder = folder
        self._name = f"{kind}-{record.owner}"
        self._interval = interval
        self._tell = tell
        self._tick = min(interval, tell_interval)
        self._beat = self._size = 0
        # As it was written last.
        self._ready = 0.0
        self._path: Path | None = None
        self._is_ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="progress", daemon=True)

    def __enter__(self) -> "ProgressWriter":
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_ended = True
        self._wake.set()
        self._thread.join()
        self._write(rewrite=False)

    def write_soon(self, size: int) -> None:
        """Give a heartbeat now; the log has this size. The record follows with the next one that is due."""
        self._size = size
        self._wake.set()

    def _keep_writing(self) -> None:
        next_write = time.monotonic() + self._interval
        while not self._is_ended:
            has_news = self._wake.wait(self._tick)
            self._wake.clear()
            if self._is_ended:
                return
            self.record.peak_memory_mb = peak_memory_mb()
            # At once where its supervisor, or the leader, would take it for one that still loads.
            is_due = time.monotonic() >= next_write or self.record.ready != self._ready
            if is_due:
                next_write = time.monotonic() + self._interval
            if is_due or has_news:
                self._write(rewrite=is_due)
            self._tell(self.record)

    def _write(self, *, rewrite: bool = True) -> None:
        """Give a heartbeat; a full disk is reported by the unit that meets it."""
        self.record.updated = time.time()
        self._beat += 1
        beat = ENDED if self._is_ended else str(self._beat)
        path = self._folder / f"{self._name}.{beat}.{self._size}.json"
        with suppress(OSError):
            before, is_renamed = self._path, False
            if before is not None and not rewrite:
                # Others that have taken this process for dead have given it another name.
                with suppress(FileNotFoundError):
                    before.rename(path)
                    is_renamed = True
            if not is_renamed:
                write_new(path, msgspec.json.encode(self.record))
                self._ready = self.record.ready
                if before is not None:
                    before.unlink(missing_ok=True)
            self._path = path


def peak_memory_mb() -> float:
    """Return the most memory that this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def mark_ended(folder: Path, owner: str, *, size: int | None = None, record: RankProgress | None = None) -> None:
    """Give the last heartbeat of a rank that has ended, and may not have done so itself.

    Args:
        size: that of its log by now; by default as it said last.
        record: of one that has never begun.
    """
    with suppress(OSError):
        found = list_heartbeats(folder).get(owner)
        if found is not None and found.has_ended and size is None:
            return
        last = size if size is not None else found.size if found is not None else 0
        goal = folder / f"rank-{owner}.{ENDED}.{last}.json"
        if found is not None:
            (folder / found.file).rename(goal)
        elif record is not None:
            write_new(goal, msgspec.json.encode(record))


def read_heartbeat(folder: Path, heartbeat: Heartbeat) -> RankProgress | None:
    """Return the progress of a process by its heartbeat; None if it cannot be read, or has changed its name since."""
    # It is not synced to disk: it may be empty after a power cut, gone because a relaunch has begun, or stale on a
    # shared disk. Progress is for people to look at: no such error ends a run.
    with suppress(*NOT_JSON, OSError, ConfigError):
        with open_stored(folder / heartbeat.file) as stream:
            record = msgspec.json.decode(stream.read(1 << 20), type=RankProgress)
            record.written = os.fstat(stream.fileno()).st_mtime
        record.ended = heartbeat.has_ended
        return record
    return None


def read_progress(folder: Path, kind: str = "rank") -> list[RankProgress]:
    """Return the progress of all processes of a kind, in the order of the ranks."""
    found: dict[str, RankProgress] = {}
    # A name may change between the listing and the look.
    for _ in range(2):
        with suppress(FileNotFoundError):
            for owner, heartbeat in list_heartbeats(folder, kind).items():
                if owner not in found and (record := read_heartbeat(folder, heartbeat)) is not None:
                    found[owner] = record
    return in_order(found.values())


def in_order(ranks: Iterable[RankProgress]) -> list[RankProgress]:
    """Return the progress of ranks in their order."""
    return sorted(ranks, key=lambda record: (record.rank, record.started))
