"""Progress and heartbeats of ranks and drivers: one file per process, whose name changes with every heartbeat.

The name is ``<kind>-<owner>.<beat>.<size>.json``. ``beat`` counts the heartbeats and is ``ended`` in the last one;
``size`` is the size of the process's log in bytes. A single listing of the folder therefore shows which processes are
alive and which logs have grown.
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
# A process counts as silent after this many seconds without a heartbeat. A shared file system may show a heartbeat to
# other nodes half a minute late.
SILENT_SECONDS = 60.0
ENDED = "ended"

# Plausible bounds on the numbers that a rank reports, such as seconds or megabytes.
_Number = Annotated[float, msgspec.Meta(gt=-1e12, lt=1e12)]


class RankProgress(Process, kw_only=True):
    """The latest progress of one process, a rank or a driver.

    Times are Unix seconds by the process's own clock, which may differ from other clocks by minutes.

    Attributes:
        rank: number of the rank, -1 for a driver.
        slot: the host with its GPU or core, "" for a driver.
        owner: the random id of the process.
        started, updated: times of the start and of the last update.
        unit, generation: the unit in progress, None if there is none, and the generation of the claim on it.
        unit_began: the time at which the attempt at the unit began.
        unit_limit: the time limit of the attempt in seconds, None if there is none.
        units_done, cost_done: number and total cost of the completed units.
        unit_cost_done: the processed part of the cost of the unit in progress.
        peak_memory_mb: peak memory of the process so far.
        ready: the time at which the rank was loaded, 0 before that.
        ended: True if the process has ended.
        written: the time, by the clock of the file system, at which the record was written; set when it is read.
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
        """Return True if the process is not known to have ended and has sent a heartbeat within the last ``seconds``.

        ``now`` must be a time by the clock of the file system, like ``written``. A ``written`` time far in the future
        does not count as a heartbeat.
        """
        return not self.ended and abs(now - self.written) <= seconds and not self.is_known_dead()


class Heartbeat(NamedTuple):
    """A heartbeat, parsed from the name of a process's file.

    Attributes:
        file: the name of the file.
        owner: the random id of the process.
        beat: number of heartbeats so far, or ``ended``.
        size: size of the process's log in bytes.
    """

    file: str
    owner: str
    beat: str
    size: int

    @property
    def has_ended(self) -> bool:
        return self.beat == ENDED


def list_heartbeats(folder: Path, kind: str = "rank") -> dict[str, Heartbeat]:
    """Return the last heartbeat of each process of a kind, by owner, from a single listing of the folder."""
    found: dict[str, Heartbeat] = {}
    for file in sorted(path.name for path in folder.iterdir()):
        name, _, rest = file.partition(".")
        beat, _, size = rest.removesuffix(".json").partition(".")
        if not (name.startswith(f"{kind}-") and size.isdecimal() and (beat.isdecimal() or beat == ENDED)):
            continue
        heartbeat = Heartbeat(file, name.removeprefix(f"{kind}-"), beat, int(size))
        # A process that was wrongly taken for dead has two files. It has ended only if the names of both files say so.
        before = found.get(heartbeat.owner)
        if before is None or _order(before) < _order(heartbeat):
            found[heartbeat.owner] = heartbeat
    return found


def _order(heartbeat: Heartbeat) -> tuple[int, int]:
    return -1 if heartbeat.has_ended else int(heartbeat.beat), heartbeat.size


class ProgressWriter:
    """Writes heartbeats from a separate thread, so that a rank with a long unit does not look dead.

    Args:
        folder: the folder of all heartbeats of the stage.
        interval: the longest time between two heartbeats, in seconds.
        tell: a function that is called with the record at least every ``tell_interval`` seconds, so that the parent
            need not read the file.

    Attributes:
        record: the progress, which the owner updates; changes are written with the next heartbeat.
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
        # The value of ``ready`` in the record that was written last.
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
        """Send a heartbeat now with this log size. The record itself is written with the next regular heartbeat."""
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
            # Write a new value of ``ready`` at once, because the supervisor and the leader treat loading ranks
            # differently.
            is_due = time.monotonic() >= next_write or self.record.ready != self._ready
            if is_due:
                next_write = time.monotonic() + self._interval
            if is_due or has_news:
                self._write(rewrite=is_due)
            self._tell(self.record)

    def _write(self, *, rewrite: bool = True) -> None:
        """Write a heartbeat. Disk errors are ignored here, since the next write of a unit reports them."""
        self.record.updated = time.time()
        self._beat += 1
        beat = ENDED if self._is_ended else str(self._beat)
        path = self._folder / f"{self._name}.{beat}.{self._size}.json"
        with suppress(OSError):
            before, is_renamed = self._path, False
            if before is not None and not rewrite:
                # The file is missing here if another process took this one for dead and renamed the file.
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
    """Return the peak memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def mark_ended(folder: Path, owner: str, *, size: int | None = None, record: RankProgress | None = None) -> None:
    """Write the last heartbeat on behalf of a rank that has ended, unless the rank has written it itself.

    Args:
        size: the present size of the rank's log in bytes; by default the size in its last heartbeat.
        record: the progress to write for a rank that has never sent a heartbeat.
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
    """Return the progress in the file of a heartbeat; None if the file cannot be read or was renamed meanwhile."""
    # The file is not synced to disk, so it may be empty after a power failure, removed by a new launch, or stale on a
    # shared disk. None of these problems may end a run, because progress is only for display.
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
    # Try twice, because a name may change between listing and reading.
    for _ in range(2):
        with suppress(FileNotFoundError):
            for owner, heartbeat in list_heartbeats(folder, kind).items():
                if owner not in found and (record := read_heartbeat(folder, heartbeat)) is not None:
                    found[owner] = record
    return in_order(found.values())


def in_order(ranks: Iterable[RankProgress]) -> list[RankProgress]:
    """Return the progress of ranks in the order of their numbers."""
    return sorted(ranks, key=lambda record: (record.rank, record.started))
