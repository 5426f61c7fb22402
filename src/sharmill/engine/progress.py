"""What a rank tells of itself while it works: heartbeats in a file of its own, where its time goes, optional curves.

Curves of throughput and rejects go to Weights & Biases, and are off unless configured. A missing package, a missing key
or a network that is down costs the curve, never the run.
"""

import io
import logging
import os
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from sharmill.config import MetricsConfig
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import ConfigError
from sharmill.files.atomic import temp_path, write_new
from sharmill.files.host import Process
from sharmill.files.stored import NOT_JSON, open_stored

BEATS_PER_LEASE = 8
# A shared file system may show a record to other nodes half a minute later.
SILENT_SECONDS = 60.0

# Seconds or megabytes that a rank can have.
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


_decoder = msgspec.json.Decoder(RankProgress)


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
                record = _decoder.decode(stream.read(1 << 20))
                record.written = os.fstat(stream.fileno()).st_mtime
            records.append(record)
    return sorted(records, key=lambda record: (record.rank, record.started))


_seconds: defaultdict[str, float] = defaultdict(float)


@contextmanager
def spent_on(delay: Literal["decoding", "model", "disk"]) -> Iterator[None]:
    """Add the time of a context to that of a kind, for the rank that this process is.

    For the one thread that does the units: what runs ahead beside it delays nothing.
    """
    started = time.monotonic()
    try:
        yield
    finally:
        _seconds[delay] += time.monotonic() - started


def take_delays() -> dict[str, float]:
    """Return the seconds since the last call, by kind, and begin anew."""
    taken = {name: round(seconds, 3) for name, seconds in sorted(_seconds.items())}
    _seconds.clear()
    return taken


log = logging.getLogger(__name__)


class Curves:
    """Values over steps in places such as Weights & Biases. An error of a place ends its curves, never the run."""

    def __init__(self) -> None:
        # By name: what adds the values of a step, and what writes what is still held.
        self._places: dict[str, tuple[Callable[[dict[str, Any], int], object], Callable[[], object]]] = {}

    def add_point(self, values: dict[str, Any], step: int) -> None:
        """Add a point to every curve."""
        for name, (write, _) in list(self._places.items()):
            self._try(name, write, values, step)

    def close(self) -> None:
        """Write what the curves still hold."""
        for name, (_, close) in list(self._places.items()):
            self._try(name, close)

    def _open_wandb(self, *, timeout: float = 30.0, **options: Any) -> None:
        """Begin a run in Weights & Biases; no key is asked for, and no wait is without a limit.

        Args:
            timeout: seconds to wait for the server at the start and at the end.
            options: of ``wandb.init``.
        """
        import wandb

        # Without a limit a network that goes down during the run would keep its end waiting for ever.
        settings = wandb.Settings(init_timeout=timeout, finish_timeout=timeout, silent=True)
        # Without a key, Weights & Biases would ask for one at a terminal, and the run would wait for an answer.
        stdin, sys.stdin = sys.stdin, io.StringIO()
        try:
            run = wandb.init(settings=settings, **options)
        finally:
            sys.stdin = stdin
        self._places["wandb"] = lambda values, step: run.log(values, step=step), run.finish

    def _try(self, place: str, action: Callable[..., object], /, *arguments: Any, **options: Any) -> None:
        try:
            action(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a curve must not cost the run
            self._places.pop(place, None)
            log.warning("%s is off for this rank: %s: %s", place, type(error).__name__, error)


class MetricsLog(Curves):
    """Curves of one rank over its units; ``folder`` is there as long as the plan is the present one.

    Args:
        timeout: seconds to wait for the server at the start and at the end.
    """

    def __init__(
        self, config: MetricsConfig, stage_name: str, folder: Path, rank: int, *, timeout: float = 30.0
    ) -> None:
        super().__init__()
        self._started = time.monotonic()
        self._units, self._audio_seconds, self._rejects = 0, 0.0, 0
        if config.wandb_project:
            self._try(
                "wandb", self._open_wandb,
                project=config.wandb_project, entity=config.wandb_entity, group=stage_name, dir=str(folder),
                name="-".join(filter(None, [config.wandb_name, stage_name, f"rank-{rank:03d}"])), timeout=timeout,
            )  # fmt: skip

    def commit(self, unit: Unit, commit: Commit) -> None:
        """Add the point of a unit that is done."""
        self._units += 1
        self._audio_seconds += unit.cost
        self._rejects += commit.num_rejected
        self.add_point(
            {
                "audio_hours": self._audio_seconds / 3600,
                "audio_hours_per_hour": self._audio_seconds / max(time.monotonic() - self._started, 1e-6),
                "unit_seconds": commit.seconds,
                "rejects": float(self._rejects),
            },
            self._units,
        )
