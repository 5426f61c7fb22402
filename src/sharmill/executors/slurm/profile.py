"""Cluster profiles: the resources of a rank on a given cluster, from one YAML file."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Final, Literal

import msgspec

from sharmill.config import Positive
from sharmill.engine.stage import Resource
from sharmill.registry import STAGES, nearest

# Mutually exclusive options for memory.
_MEMORY: Final = ("mem", "mem-per-cpu", "mem-per-gpu")
# Options that would silently override values on which the program relies, with the remedy for the message.
_NOT_EXTRA = (
    dict.fromkeys(
        ("array", "chdir", "dependency", "error", "job-name", "open-mode", "output", "requeue", "no-requeue"),
        "sharmill sets it itself",
    )
    # With several tasks, each would do the work of the same rank.
    | dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu"), "a rank is one task on one node")
    | dict.fromkeys(_MEMORY, "set memory_gb, or set it to null")
    | {"time": "set timeout_min", "signal": "set signal_s of the profile", "cpus-per-task": "set cores"}
)
# The key in ``stages`` for the values of driver jobs.
DRIVER: Final = "driver"


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Resources of one rank."""

    partition: str | None = None
    """Partition for the jobs; ``null`` for the cluster's default."""
    account: str | None = None
    """Account to charge; ``null`` for the profile's."""
    qos: str | None = None
    """Quality of service; ``null`` for the profile's."""
    max_parallel: Positive | None = None
    """Maximum number of ranks of one stage that run at once; ``null`` for the profile's value."""
    max_ranks: Positive = 64
    """Maximum number of ranks of one stage. They form one job array, so the cluster's ``MaxArraySize`` must allow
    it."""
    gpus: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    """Number of GPUs of a rank, one or none. For several GPUs of a node, allow several ranks (``max_ranks``). Not sent
    to SLURM if ``gres`` in ``extra`` requests GPUs."""
    cores: Positive = 1
    """Number of CPU cores of a rank."""
    memory_gb: Annotated[float, msgspec.Meta(gt=0)] | None = 4.0
    """Memory of a rank, in GB. ``null`` omits ``--mem``, for clusters that refuse it; ``extra`` may then have
    ``mem-per-cpu`` or ``mem-per-gpu``."""
    timeout_min: Positive = 240
    """Time limit of a rank, in minutes."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device on which models run. With ``cuda``, a rank that finds no GPU ends with an error."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further sbatch options by their long names, such as ``{constraint: a100, exclude: "node[7-8]"}``. ``true`` stands
    for an option without a value; ``null`` and ``false`` omit an option."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", by_long_name(self.extra))
        for name, value in self.extra.items():
            is_free = name in _MEMORY and (self.memory_gb is None or value is None)
            if not is_free and (remedy := _NOT_EXTRA.get(name)) is not None:
                raise ValueError(f"extra must not contain {name}: {remedy}")


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """A cluster, and the resources of ranks on it."""

    gpu: RankProfile = field(default_factory=lambda: RankProfile(gpus=1, device="cuda"))
    """Ranks of match and encode; see below."""
    cpu: RankProfile = field(default_factory=RankProfile)
    """Ranks of the other stages, and the driver jobs between the stages; see below."""
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Different values for keys of ``gpu`` and ``cpu``, by stage: ``prepare``, ``match``, ``write``, ``encode`` (on
    GPUs), ``validate``, stages of other packages, and ``driver`` for driver jobs. ``extra`` is added to the options of
    ``gpu`` or ``cpu``; the stage's value of an option takes precedence."""
    account: str | None = None
    """Account to charge (``sbatch --account``)."""
    qos: str | None = None
    """Quality of service (``sbatch --qos``)."""
    max_parallel: Positive = 256
    """Maximum number of ranks of one stage that run at once."""
    max_parallel_all: Positive | None = None
    """Maximum number of ranks that run at once for all datasets of one ``sharmill submit``. Each dataset gets an equal
    share, at least one rank; ``max_parallel`` still applies."""
    signal_s: Positive = 90
    """How long before its time limit a rank is told to stop, in seconds."""
    max_requeues: Annotated[int, msgspec.Meta(ge=0)] = 100
    """Maximum number of requeues of a rank because of its time limit."""
    python: str | None = None
    """Python interpreter for the ranks, or the beginning of a command such as ``apptainer exec --nv IMAGE python``;
    ``null`` for the interpreter that runs ``sharmill submit``. With pyxis, this is the interpreter inside the
    container."""
    driver_units: Annotated[int, msgspec.Meta(ge=0)] = 4
    """The driver job itself processes a CPU stage with at most this many units per worker, instead of queueing ranks.
    The job's cores and memory determine the number of workers. ``0``: never."""
    driver_hours: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """Maximum hours of audio of a stage that a driver job processes itself. ``prepare``, and the part of ``encode``
    that puts codes into shards, are limited only by ``driver_units``."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that run before a rank or a driver job starts, such as ``module load cuda``. Each item is a
    complete command; use ``|`` for one of several lines. If one fails, the job ends; add ``|| true`` to a command that
    may fail."""
    notify: str | None = None
    """Shell command that a driver job runs once, when the run is complete or has failed, such as ``mail -s
    "$SHARMILL_NAME $SHARMILL_STATE" me@example.org``. Its environment has ``SHARMILL_NAME``, ``SHARMILL_STATE``
    (``done`` or ``failed``), ``SHARMILL_FINDINGS`` (number of findings), ``SHARMILL_MESSAGE`` and ``SHARMILL_RUN_DIR``;
    its standard input is the message."""
    container_image: str | None = None
    """Container image for ranks (requires pyxis). Driver jobs run outside the container."""
    container_mounts: list[str] = field(default_factory=list)
    """Mounts of the container, such as ``/data:/data``."""

    def __post_init__(self) -> None:
        profiles = {"gpu": self.gpu, "cpu": self.cpu}
        keys = [key.name for key in fields(RankProfile)]
        for stage, own in self.stages.items():
            if stage not in (names := [*STAGES.names(), DRIVER]):
                raise ValueError(f"stages: unknown stage '{stage}'{nearest(stage, names)}")
            for key in own:
                if key not in keys:
                    raise ValueError(f"stages.{stage}: unknown key '{key}'{nearest(key, keys)}")
            try:
                resource: Resource = "cpu" if stage == DRIVER else STAGES.load_class(stage).resource
                profiles[f"stages.{stage}"] = self.for_stage(stage, resource)
            except ValueError as error:
                raise ValueError(f"stages.{stage}: {error}") from error
        for name, ranks in profiles.items():
            if self.signal_s >= ranks.timeout_min * 60:
                raise ValueError(
                    f"signal_s ({self.signal_s} s) must be shorter than {name}.timeout_min ({ranks.timeout_min} min)"
                )

    def for_stage(self, kind: str, resource: Resource) -> RankProfile:
        """Return the profile for ranks of a kind of stage.

        The keys below ``stages`` apply only to the main round of a step. All other rounds, such as the round that puts
        codes into shards, use the profile of their resource unchanged.
        """
        ranks = self.gpu if resource == "gpu" else self.cpu
        own = self.stages.get(kind, {})
        extra = ranks.extra | by_long_name(own.get("extra", {}))
        return msgspec.convert(asdict(ranks) | own | {"extra": extra}, RankProfile, strict=False)

    def options(self, ranks: RankProfile, count: int = 1) -> dict[str, Any]:
        """Return sbatch options for ``count`` ranks on one node, by long name; True for an option without a value."""
        values = {
            "partition": ranks.partition,
            "account": ranks.account or self.account,
            "qos": ranks.qos or self.qos,
            "cpus-per-task": ranks.cores * count,
            "gpus-per-node": ranks.gpus * count or None,
            "mem": None if ranks.memory_gb is None else f"{round(ranks.memory_gb * 1024) * count}M",
            "time": ranks.timeout_min,
            **ranks.extra,
        }
        values = {
            name: ",".join(map(str, value)) if isinstance(value, list) else value
            for name, value in values.items()
            if value is not None and value is not False
        }
        gres = str(values.get("gres", "")).split(",")
        if any(map(_is_of_gpus, gres)):
            values.pop("gpus-per-node", None)
            values["gres"] = ",".join(_multiply_gpus(one, count) for one in gres)
        return values

    def arguments(self, ranks: RankProfile, count: int = 1) -> list[str]:
        """Return the result of ``options`` as command-line arguments."""
        options = self.options(ranks, count)
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]

    @property
    def driver(self) -> RankProfile:
        """The profile of driver jobs."""
        return self.for_stage(DRIVER, "cpu")


def by_long_name(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return sbatch options by the names that sbatch uses: ``mem_per_cpu`` becomes ``mem-per-cpu``."""
    return {name.lstrip("-").replace("_", "-"): value for name, value in extra.items()}


def _is_of_gpus(gres: str) -> bool:
    return gres.split(":")[0] == "gpu"


def _multiply_gpus(gres: str, count: int) -> str:
    """Multiply the number of GPUs in a resource such as ``gpu:a100:1``; other generic resources stay unchanged."""
    name, _, number = gres.rpartition(":")
    if not _is_of_gpus(gres):
        return gres
    return f"{name}:{int(number) * count}" if number.isdecimal() else f"{gres}:{count}"
