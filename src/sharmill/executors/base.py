"""Base of the executors that a configuration can name: the keys that all of them have, and what they are asked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec

from sharmill.config import Config, require
from sharmill.engine.follow import Follower
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.run import Executor, Unlocked
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.state import driven_round
from sharmill.engine.unit import Unit
from sharmill.executors.slurm.queue import require_no_jobs


class Check(msgspec.Struct, frozen=True):
    """A thing of this machine that was looked at: what was found, and what to do where that is off."""

    name: str
    found: str
    to_do: str = ""


@dataclass(frozen=True)
class ConfiguredExecutor(Executor):
    """Place where the stages run. SLURM has no key here: `sharmill submit` takes a cluster profile.

    A subclass is a frozen dataclass with its further keys, whose ``kind`` is its name in the registry. It starts
    supervisors, whose ranks do the units.

    Attributes:
        runs_here: its ranks are on this machine alone.
        goes_on: attempts of ranks that have ended before count on.
    """

    runs_here: ClassVar[bool] = False
    goes_on: ClassVar[bool] = False

    kind: str = field(default="local", kw_only=True)
    """``local``: processes on this machine. ``ray``: actors on a Ray cluster. Or an executor of another package:
    ``python:package.module:Class``."""
    workers: int | Literal["auto"] = "auto"
    """Number of ranks. ``auto``: one per visible GPU for match and encode where there are any, else one per core. ``1``
    on the CPU runs inside the process, so that a debugger works."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of match and encode. ``auto``: a GPU for each rank where there are any; a job that was given GPUs and
    finds none is refused. ``cuda``: GPUs or nothing; on Ray, wait for GPU nodes. ``cpu``: no GPU is touched."""
    unit_time_limit: float | Literal["auto"] | None = "auto"
    """Seconds that an attempt at a unit may take, on SLURM too; a rank that takes longer is ended with a traceback in
    its log and replaced, and the attempt has failed. ``auto``: ten seconds for each second of audio or record of the
    unit, and an hour at least; none where ``workers: 1`` runs inside the process, which a number of seconds prevents.
    ``null``: no limit."""
    scratch: str | None = None
    """Folder on a disk of each node, such as ``$TMPDIR`` (its value on the node counts): there ranks write the files of
    a unit, on SLURM too, before they copy them beside the dataset. ``null``: they write beside it at once."""
    seconds_until_seen: float = 60.0
    """Seconds until every node sees what another has written, on SLURM and Ray: so long is waited, where need be, for
    files that others have made. 60 is the longest that NFS keeps names by its defaults (``acdirmax``). File systems
    that are coherent, as Lustre, GPFS and CephFS are, need none: 0."""
    least_seconds_per_rank: float | None = None
    """Least predicted work of a rank on SLURM, in seconds: no more ranks are submitted than have so much, where the
    pace of the stage is known by a pilot (`sharmill calibrate`) or by what is done. ``null``: four times what starting
    a rank and loading its model took in the pilot. ``0``: as many ranks as the profile allows."""

    def __post_init__(self) -> None:
        require((self.least_seconds_per_rank or 0.0) >= 0, "least_seconds_per_rank must not be negative")
        require(self.workers == "auto" or int(self.workers) >= 1, "workers must be 'auto' or a number from 1")
        limit = self.unit_time_limit
        require(limit in (None, "auto") or float(limit) > 0, "unit_time_limit must be positive, auto or null")
        require(self.seconds_until_seen >= 0, "seconds_until_seen must not be negative")

    @classmethod
    def examine(cls) -> Iterator[Check]:
        """Yield what `sharmill doctor` is to tell about executors of this class on this machine."""
        yield from ()

    def check(self, config: Config) -> None:
        """Raise ConfigError where the runs of a configuration cannot work here."""

    def find_jobs(self, run_dir: RunDir, *, joins: bool, take_over: bool) -> Sequence[Any]:
        if not joins:
            require_no_jobs(run_dir, take_over=take_over)
        return ()

    def run(
        self, stage: Stage, units: Sequence[Unit], listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> StageResult:  # fmt: skip
        """Do the units, and return those that failed for good; see ``engine.run.Executor``."""
        # Ranks of other nodes may come later than those that are there.
        join_seconds = 0.0 if self.runs_here else stage.lease_seconds
        most = max(1, min(self.num_ranks(stage, units), len(units)))
        with driven_round(stage, units, most, join_seconds=join_seconds, goes_on=self.goes_on) as numbers:
            follower = Follower(stage, units, listener)
            with unlocked():
                self.supervise(stage, numbers, follower)
        return follower.outcome()

    @abstractmethod
    def num_ranks(self, stage: Stage, units: Sequence[Unit]) -> int:
        """Return the number of ranks that are wanted; there are never more than units."""

    @abstractmethod
    def supervise(self, stage: Stage, numbers: Sequence[int], follower: Follower) -> None:
        """Start ranks with these numbers, and return when they have ended; ``look`` with the follower meanwhile.

        A ``Supervisor`` runs ranks in this process's environment; ``supervise_rank`` does so in a process elsewhere.
        """
