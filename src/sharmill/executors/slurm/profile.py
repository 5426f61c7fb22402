"""Cluster profiles: what a rank needs on a given cluster, in one commented YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sharmill.config import load_typed

# Options that would silently win over what the program counts on.
_NOT_EXTRA = dict.fromkeys(
    ("array", "chdir", "dependency", "error", "job-name", "open-mode", "output", "requeue", "no-requeue"),
    "sharmill sets it by itself",
) | {"time": "set timeout_min", "signal": "set signal_s of the profile"}


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Resources of one rank."""

    partition: str | None = None
    """Partition to submit to; ``null`` is the cluster's default."""
    max_ranks: int = 64
    """Most ranks of one stage; there are never more than units."""
    gpus: int = 0
    """GPUs of a rank: one, or none. Several GPUs of a node are so many ranks, as ``max_ranks`` allows."""
    cores: int = 1
    """CPU cores of a rank."""
    memory_gb: float = 4.0
    """Memory of a rank, in GB."""
    timeout_min: int = 240
    """Time limit of a rank, in minutes. A rank that reaches it is requeued and goes on."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that models run on. With ``cuda``, a rank that finds no GPU ends with an error."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further sbatch options by their long names, such as ``{constraint: a100, exclude: "node[7-8]"}``."""

    def __post_init__(self) -> None:
        if self.max_ranks < 1 or self.cores < 1 or self.timeout_min < 1 or self.gpus < 0 or self.memory_gb <= 0:
            raise ValueError("max_ranks, cores, timeout_min and memory_gb must be positive, gpus not negative")
        if self.gpus > 1:
            raise ValueError(f"gpus is {self.gpus}, and a rank uses one: set gpus: 1, and max_ranks to their number")
        for name in self.extra:
            if (remedy := _NOT_EXTRA.get(name.replace("_", "-"))) is not None:
                raise ValueError(f"extra must not have {name}: {remedy}")


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """A cluster and what a rank gets of it."""

    gpu: RankProfile = field(default_factory=lambda: RankProfile(gpus=1, device="cuda"))
    """Ranks of match and encode: see below."""
    cpu: RankProfile = field(default_factory=RankProfile)
    """Ranks of the other stages, and the driver jobs between the stages: see below."""
    account: str | None = None
    """Account to charge (``sbatch --account``)."""
    qos: str | None = None
    """Quality of service (``sbatch --qos``)."""
    max_parallel: int = 256
    """Most ranks of one stage that run at once."""
    signal_s: int = 90
    """Seconds before its time limit at which a rank is told to leave."""
    max_requeues: int = 100
    """How often one rank may be requeued for its time limit."""
    python: str | None = None
    """Python interpreter of the ranks; ``null`` is the one that submits. In a container, the interpreter inside it."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that run before a rank or a driver job starts, such as ``module load cuda``. Each is a whole
    command, of several lines with ``|``. Where one fails, the job ends: add ``|| true`` to one that may."""
    container_image: str | None = None
    """Container image that ranks run in (needs pyxis). Driver jobs run outside it."""
    container_mounts: list[str] = field(default_factory=list)
    """Mounts of the container, such as ``/data:/data``."""

    def __post_init__(self) -> None:
        if self.max_parallel < 1 or self.max_requeues < 0 or self.signal_s < 1:
            raise ValueError("max_parallel and signal_s must be positive, max_requeues not negative")
        for name, ranks in (("gpu", self.gpu), ("cpu", self.cpu)):
            if self.signal_s >= ranks.timeout_min * 60:
                raise ValueError(
                    f"signal_s of {self.signal_s} leaves no time before {name}.timeout_min of {ranks.timeout_min}"
                )

    def for_stage(self, uses_gpu: bool) -> RankProfile:
        """Return the profile of the ranks of a stage."""
        return self.gpu if uses_gpu else self.cpu


def load_profile(path: str | Path) -> ClusterProfile:
    """Read a cluster profile.

    Raises:
        ConfigError: with the file, the key and what to change.
    """
    return load_typed(ClusterProfile, path)
