"""Cluster profiles: what a rank needs on a given cluster, in one commented YAML file."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Final, Literal

import msgspec

from sharmill.config import Positive
from sharmill.engine.stage import Resource
from sharmill.registry import STAGES, nearest

# One of them is all that a job may have.
_MEMORY: Final = ("mem", "mem-per-cpu", "mem-per-gpu")
# Options that would silently win over what the program counts on.
_NOT_EXTRA = (
    dict.fromkeys(
        ("array", "chdir", "dependency", "error", "job-name", "open-mode", "output", "requeue", "no-requeue"),
        "sharmill sets it by itself",
    )
    # Each task would do what one rank is to do.
    | dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu"), "a rank is one task on one node")
    | dict.fromkeys(_MEMORY, "set memory_gb, or set it to null")
    | {"time": "set timeout_min", "signal": "set signal_s of the profile", "cpus-per-task": "set cores"}
)
# Advance jobs, which may have values of their own as the stages may.
DRIVER: Final = "driver"


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Resources of one rank."""

    partition: str | None = None
    """Partition to submit to; ``null`` is the cluster's default."""
    account: str | None = None
    """Account to charge; ``null`` is that of the profile."""
    qos: str | None = None
    """Quality of service; ``null`` is that of the profile."""
    max_parallel: Positive | None = None
    """Most ranks of one stage that run at once; ``null`` is that of the profile."""
    max_ranks: Positive = 64
    """Most ranks of one stage, which are one array: no more than the ``MaxArraySize`` of the cluster allows. There are
    never more than units."""
    gpus: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    """GPUs of a rank: one, or none. Several GPUs of a node are so many ranks, as ``max_ranks`` allows. Not sent where
    ``gres`` in ``extra`` asks for GPUs."""
    cores: Positive = 1
    """CPU cores of a rank."""
    memory_gb: Annotated[float, msgspec.Meta(gt=0)] | None = 4.0
    """Memory of a rank, in GB. ``null`` leaves ``--mem`` out, for clusters that refuse it; ``extra`` may then have
    ``mem-per-cpu`` or ``mem-per-gpu``."""
    timeout_min: Positive = 240
    """Time limit of a rank, in minutes. A rank that reaches it is requeued and goes on."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that models run on. With ``cuda``, a rank that finds no GPU ends with an error."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further sbatch options by their long names, such as ``{constraint: a100, exclude: "node[7-8]"}``. ``true`` is an
    option without a value; ``null`` and ``false`` leave one out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", by_long_name(self.extra))
        for name, value in self.extra.items():
            is_free = name in _MEMORY and (self.memory_gb is None or value is None)
            if not is_free and (remedy := _NOT_EXTRA.get(name)) is not None:
                raise ValueError(f"extra must not have {name}: {remedy}")


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """A cluster and what a rank gets of it."""

    gpu: RankProfile = field(default_factory=lambda: RankProfile(gpus=1, device="cuda"))
    """Ranks of match and encode: see below."""
    cpu: RankProfile = field(default_factory=RankProfile)
    """Ranks of the other stages, and the advance jobs between the stages: see below."""
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keys of ``gpu`` and ``cpu`` that are different for one of the stages ``prepare``, ``match``, ``write``,
    ``encode`` (on GPUs), ``validate`` and those of other packages, or for ``driver``, the advance
    jobs between the stages. ``extra`` comes beside that of ``gpu`` or ``cpu``; of two options with one name that of
    the stage counts."""
    account: str | None = None
    """Account to charge (``sbatch --account``)."""
    qos: str | None = None
    """Quality of service (``sbatch --qos``)."""
    max_parallel: Positive = 256
    """Most ranks of one stage that run at once."""
    max_parallel_all: Positive | None = None
    """Most ranks that run at once for all datasets of one ``sharmill submit``: each gets an equal share, and one rank
    at least, also where ``max_parallel`` allows more. ``null``: as ``max_parallel`` of each says."""
    signal_s: Positive = 90
    """Seconds before its time limit at which a rank is told to leave."""
    max_requeues: Annotated[int, msgspec.Meta(ge=0)] = 100
    """How often one rank may be requeued for its time limit."""
    python: str | None = None
    """Python interpreter of the ranks, or the beginning of a command such as ``apptainer exec --nv IMAGE python``;
    ``null`` is the one that submits. In a container of pyxis, the interpreter inside it."""
    driver_units: Annotated[int, msgspec.Meta(ge=0)] = 4
    """A stage on the CPU with at most so many units per worker is done by the advance job itself, instead of by ranks
    that have to wait in the queue. It has as many workers as its cores and memory are enough for. ``0``: none is."""
    driver_hours: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """Most hours of audio of a stage that an advance job does itself. ``prepare``, and the part of ``encode`` that puts
    codes into shards, whose work goes by records, have no limit but ``driver_units``."""
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
        profiles = {"gpu": self.gpu, "cpu": self.cpu}
        keys = [key.name for key in fields(RankProfile)]
        for stage, own in self.stages.items():
            if stage not in (names := [*STAGES.names(), DRIVER]):
                raise ValueError(f"stages has no '{stage}'{nearest(stage, names)}")
            for key in own:
                if key not in keys:
                    raise ValueError(f"stages.{stage} has no '{key}'{nearest(key, keys)}")
            try:
                resource: Resource = "cpu" if stage == DRIVER else STAGES.load_class(stage).resource
                profiles[f"stages.{stage}"] = self.for_stage(stage, resource)
            except ValueError as error:
                raise ValueError(f"stages.{stage}: {error}") from error
        for name, ranks in profiles.items():
            if self.signal_s >= ranks.timeout_min * 60:
                raise ValueError(
                    f"signal_s of {self.signal_s} leaves no time before {name}.timeout_min of {ranks.timeout_min}"
                )

    def for_stage(self, kind: str, resource: Resource) -> RankProfile:
        """Return the profile of the ranks of a kind of stage, which needs a resource; rounds of a step have their own.

        Rounds on CPUs, which put codes into the shards, have the profile ``cpu`` as it is.
        """
        ranks = self.gpu if resource == "gpu" else self.cpu
        own = self.stages.get(kind, {})
        extra = ranks.extra | by_long_name(own.get("extra", {}))
        return msgspec.convert(asdict(ranks) | own | {"extra": extra}, RankProfile, strict=False)

    def options(self, ranks: RankProfile, count: int = 1) -> dict[str, Any]:
        """Return sbatch's options for so many ranks on one node, by their long names; True is one without a value."""
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
        """Return ``options`` as a command line has them."""
        options = self.options(ranks, count)
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]

    @property
    def driver(self) -> RankProfile:
        """The profile of advance jobs."""
        return self.for_stage(DRIVER, "cpu")


def by_long_name(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return sbatch options by their names as sbatch has them: ``mem_per_cpu`` is ``mem-per-cpu``."""
    return {name.lstrip("-").replace("_", "-"): value for name, value in extra.items()}


def _is_of_gpus(gres: str) -> bool:
    return gres.split(":")[0] == "gpu"


def _multiply_gpus(gres: str, count: int) -> str:
    """Return a generic resource such as ``gpu:a100:1`` so many times; one that is no GPUs is that of a node."""
    name, _, number = gres.rpartition(":")
    if not _is_of_gpus(gres):
        return gres
    return f"{name}:{int(number) * count}" if number.isdecimal() else f"{gres}:{count}"
