"""Cluster profiles: what a rank needs on a given cluster, in one commented YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sharmill.config import load_typed


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """What one rank of a kind of stage asks for. ``extra`` are further sbatch options, by their long names.

    ``device`` is what the model runs on: ``cuda`` is an error where the rank finds no GPU, never a slow success.
    """

    partition: str | None = None
    max_ranks: int = 64
    gpus: int = 0
    cores: int = 1
    memory_gb: float = 4.0
    timeout_min: int = 240
    device: Literal["cpu", "cuda"] = "cpu"
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_ranks < 1 or self.cores < 1 or self.timeout_min < 1 or self.gpus < 0 or self.memory_gb <= 0:
            raise ValueError("max_ranks, cores, timeout_min and memory_gb must be positive, gpus not negative")


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """A cluster: ``gpu`` for match and encode, ``cpu`` for all else and for the steps between stages.

    ``max_parallel`` limits how many ranks of one stage run at once; ``signal_s`` is how long before its time limit a
    rank is told to leave; ``max_requeues`` how often a rank may be requeued for its time limit. ``setup`` are shell
    lines before a rank starts. With a ``container_image`` the rank runs in it (pyxis), with ``container_mounts``, and
    ``python`` is the interpreter there; the steps between stages run outside, with the interpreter that submits.
    """

    gpu: RankProfile = field(default_factory=lambda: RankProfile(gpus=1, device="cuda"))
    cpu: RankProfile = field(default_factory=RankProfile)
    account: str | None = None
    qos: str | None = None
    max_parallel: int = 256
    signal_s: int = 90
    max_requeues: int = 100
    python: str | None = None
    setup: list[str] = field(default_factory=list)
    container_image: str | None = None
    container_mounts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.max_parallel < 1 or self.max_requeues < 0 or self.signal_s < 1:
            raise ValueError("max_parallel and signal_s must be positive, max_requeues not negative")
        for name, ranks in (("gpu", self.gpu), ("cpu", self.cpu)):
            if self.signal_s >= ranks.timeout_min * 60:
                raise ValueError(
                    f"signal_s of {self.signal_s} leaves no time before {name}.timeout_min of {ranks.timeout_min}"
                )

    def for_stage(self, uses_gpu: bool) -> RankProfile:
        """The profile of the ranks of a stage."""
        return self.gpu if uses_gpu else self.cpu


def load_profile(path: str | Path) -> ClusterProfile:
    """Raises ConfigError with the file, the key and what to change."""
    return load_typed(ClusterProfile, path)
