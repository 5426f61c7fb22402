"""Cluster profiles: what a rank needs on a given cluster, in one commented YAML file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from sharmill.config import load_typed

# Options that would silently win over what the program counts on.
_NOT_EXTRA = (
    dict.fromkeys(
        ("array", "chdir", "dependency", "error", "job-name", "open-mode", "output", "requeue", "no-requeue"),
        "sharmill sets it by itself",
    )
    # Each task would do what one rank is to do.
    | dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu"), "a rank is one task on one node")
    | dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), "set memory_gb")
    | {"time": "set timeout_min", "signal": "set signal_s of the profile", "cpus-per-task": "set cores"}
)
# Stages whose ranks have the profile ``gpu``.
_ON_GPUS = ("match", "encode")


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Resources of one rank."""

    partition: str | None = None
    """Partition to submit to; ``null`` is the cluster's default."""
    account: str | None = None
    """Account to charge; ``null`` is that of the profile."""
    qos: str | None = None
    """Quality of service; ``null`` is that of the profile."""
    max_parallel: int | None = None
    """Most ranks of one stage that run at once; ``null`` is that of the profile."""
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
        if self.max_parallel is not None and self.max_parallel < 1:
            raise ValueError("max_parallel must be positive")
        if self.gpus > 1:
            raise ValueError(f"gpus is {self.gpus}, and a rank uses one: set gpus: 1, and max_ranks to their number")
        _check_extra(self.extra)


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """Values that one stage, or the advance jobs, have of their own; ``null`` is the value of ``gpu`` or ``cpu``."""

    partition: str | None = None
    """Partition to submit to."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    max_parallel: int | None = None
    """Most ranks that run at once."""
    max_ranks: int | None = None
    """Most ranks."""
    cores: int | None = None
    """CPU cores of a rank."""
    memory_gb: float | None = None
    """Memory of a rank, in GB."""
    timeout_min: int | None = None
    """Time limit of a rank, in minutes."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further sbatch options, beside those of ``gpu`` or ``cpu``; of two with one name this one counts."""

    def __post_init__(self) -> None:
        _check_extra(self.extra)


@dataclass(frozen=True, kw_only=True)
class StageProfiles:
    """Values that single stages and the advance jobs have instead of those of ``gpu`` or ``cpu``."""

    prepare: StageProfile = field(default_factory=StageProfile)
    match: StageProfile = field(default_factory=StageProfile)
    write: StageProfile = field(default_factory=StageProfile)
    survey: StageProfile = field(default_factory=StageProfile)
    encode: StageProfile = field(default_factory=StageProfile)
    assemble: StageProfile = field(default_factory=StageProfile)
    validate: StageProfile = field(default_factory=StageProfile)
    driver: StageProfile = field(default_factory=StageProfile)


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """A cluster and what a rank gets of it."""

    gpu: RankProfile = field(default_factory=lambda: RankProfile(gpus=1, device="cuda"))
    """Ranks of match and encode: see below."""
    cpu: RankProfile = field(default_factory=RankProfile)
    """Ranks of the other stages, and the advance jobs between the stages: see below."""
    stages: StageProfiles = field(default_factory=StageProfiles)
    """Stages, and advance jobs, for which something is different: see below."""
    account: str | None = None
    """Account to charge (``sbatch --account``)."""
    qos: str | None = None
    """Quality of service (``sbatch --qos``)."""
    max_parallel: int = 256
    """Most ranks of one stage that run at once."""
    max_parallel_all: int | None = None
    """Most ranks that run at once for all datasets of one ``sharmill submit``: each gets an equal share, and one rank
    at least, also where ``max_parallel`` allows more. ``null``: as ``max_parallel`` of each says."""
    signal_s: int = 90
    """Seconds before its time limit at which a rank is told to leave."""
    max_requeues: int = 100
    """How often one rank may be requeued for its time limit."""
    python: str | None = None
    """Python interpreter of the ranks, or the beginning of a command such as ``apptainer exec --nv IMAGE python``;
    ``null`` is the one that submits. In a container of pyxis, the interpreter inside it."""
    driver_units: int = 4
    """A stage on the CPU with at most so many units per worker is done by the advance job itself, instead of by ranks
    that have to wait in the queue. It has as many workers as its cores and memory are enough for. ``0``: none is."""
    driver_hours: float = 10.0
    """Most hours of audio of a stage that an advance job does itself. ``prepare`` and ``assemble``, whose work goes by
    records, have no limit but ``driver_units``."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that run before a rank or an advance job starts, such as ``module load cuda``. Each is a whole
    command, of several lines with ``|``. Where one fails, the job ends: add ``|| true`` to one that may."""
    notify: str | None = None
    """Shell command that an advance job runs once when the run is done or has failed, such as ``mail -s "$SHARMILL_NAME
    $SHARMILL_STATE" me@example.org``. It has ``SHARMILL_NAME``, ``SHARMILL_STATE`` (``done`` or ``failed``),
    ``SHARMILL_FINDINGS`` (their number), ``SHARMILL_MESSAGE`` and ``SHARMILL_RUN_DIR``; the message is its input."""
    container_image: str | None = None
    """Container image that ranks run in (needs pyxis). Advance jobs run outside it."""
    container_mounts: list[str] = field(default_factory=list)
    """Mounts of the container, such as ``/data:/data``."""

    def __post_init__(self) -> None:
        if self.max_parallel < 1 or self.max_requeues < 0 or self.signal_s < 1:
            raise ValueError("max_parallel and signal_s must be positive, max_requeues not negative")
        if self.max_parallel_all is not None and self.max_parallel_all < 1:
            raise ValueError("max_parallel_all must be positive")
        if self.driver_units < 0 or self.driver_hours < 0:
            raise ValueError("driver_units and driver_hours must not be negative")
        for name, ranks in self._all_ranks():
            if self.signal_s >= ranks.timeout_min * 60:
                raise ValueError(
                    f"signal_s of {self.signal_s} leaves no time before {name}.timeout_min of {ranks.timeout_min}"
                )

    def for_stage(self, name: str, uses_gpu: bool) -> RankProfile:
        """Return the profile of the ranks of a stage, such as ``encode/builtin``, or of advance jobs (``driver``)."""
        ranks = self.gpu if uses_gpu else self.cpu
        own = getattr(self.stages, name.split("/")[0], StageProfile())
        changed = {field.name: value for field in fields(own) if (value := getattr(own, field.name)) is not None}
        return replace(ranks, **(changed | {"extra": {**ranks.extra, **own.extra}}))

    def among(self, num_datasets: int) -> ClusterProfile:
        """Return the profile of each of so many datasets, which share ``max_parallel_all``."""
        if self.max_parallel_all is None:
            return self
        return replace(self, max_parallel_all=max(1, self.max_parallel_all // num_datasets))

    def driver_workers(self, ranks: RankProfile) -> int:
        """Return as how many ranks of a stage an advance job could work, by its cores and memory."""
        if self.python is not None or self.container_image is not None:
            # It has other packages than the ranks, and so perhaps other bytes.
            return 0
        driver = self.for_stage("driver", uses_gpu=False)
        return min(driver.cores // ranks.cores, int(driver.memory_gb / ranks.memory_gb))

    def _all_ranks(self) -> Iterator[tuple[str, RankProfile]]:
        """Yield the profiles that the keys give, with the key of each, which has to say so where one is refused."""
        yield "gpu", self.gpu
        yield "cpu", self.cpu
        for stage in fields(self.stages):
            key = f"stages.{stage.name}"
            try:
                yield key, self.for_stage(stage.name, stage.name in _ON_GPUS)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error


def _check_extra(extra: dict[str, Any]) -> None:
    for name in extra:
        if (remedy := _NOT_EXTRA.get(name.replace("_", "-"))) is not None:
            raise ValueError(f"extra must not have {name}: {remedy}")


def load_profile(path: str | Path) -> ClusterProfile:
    """Read a cluster profile.

    Raises:
        ConfigError: with the file, the key and what to change.
    """
    return load_typed(ClusterProfile, path)
