"""Base of the executors that a configuration can name: the keys that all of them have, and what they are asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import msgspec

from sharmill.config import Config, require
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.run import Unlocked
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit


class Check(msgspec.Struct, frozen=True):
    """A thing of this machine that was looked at: what was found, and what to do where that is off."""

    name: str
    found: str
    to_do: str = ""


@dataclass(frozen=True)
class ConfiguredExecutor(ABC):
    """Place where the stages run. SLURM has no key here: `sharmill submit` takes a cluster profile.

    A subclass is a frozen dataclass with its further keys, whose ``kind`` is its name in the registry.

    Attributes:
        waits: as of ``engine.run.Executor``.
        runs_here: its ranks are on this machine alone.
    """

    waits: ClassVar[bool] = True
    runs_here: ClassVar[bool] = False

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

    def check(self, config: Config) -> None:  # noqa: B027 - most run any configuration
        """Raise ConfigError where the runs of a configuration cannot work here."""

    def require_devices(self, stages: Iterable[Stage]) -> None:  # noqa: B027 - most find out where the ranks are
        """Raise ConfigError where stages are to run on GPUs of this machine, and none can be used."""

    @abstractmethod
    def run(
        self, stage: Stage, units: Sequence[Unit], listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> StageResult:  # fmt: skip
        """Do the units; see ``engine.run.Executor``."""
