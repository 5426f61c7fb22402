"""Typed configuration of one dataset: one frozen dataclass per section, checked when it is made."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

STAGES = ("prepare", "match", "write", "encode", "validate")
STAGE_ALIASES = {"stage1": "match", "stage2": "write", "stage3": "encode"}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One manifest. ``manifest`` may name shards: ``manifest__OP_0..63_CL_.json`` or ``manifest_{0..63}.json``."""

    type: Literal["nemo"] = "nemo"
    manifest: str
    audio_root: str

    def __post_init__(self) -> None:
        _require(bool(self.manifest.strip()), "manifest must not be empty")
        _require(bool(self.audio_root.strip()), "audio_root must not be empty")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Which records are usable. Durations in seconds.

    ``filters`` maps a manifest key to a comparison with a number, such as ``cer: "<= 0.03"``. ``duration_tolerance``
    is how far the manifest and the audio header may be apart. ``require_text: false`` keeps untranscribed speech.
    ``max_duration: null`` is no limit: a codec takes an utterance at once, and one of three hours more than 20 GB.
    """

    min_duration: float = 0.1
    max_duration: float | None = 600.0
    duration_tolerance: float = 0.1
    require_text: bool = True
    filters: dict[str, str] = field(default_factory=dict)
    unit_records: int = 2000

    def __post_init__(self) -> None:
        _require(self.min_duration >= 0, "min_duration must not be negative")
        _require(self.max_duration is None or self.max_duration > self.min_duration,
                 "max_duration must be greater than min_duration")  # fmt: skip
        _require(self.duration_tolerance >= 0, "duration_tolerance must not be negative")
        _require(self.unit_records > 0, "unit_records must be positive")


@dataclass(frozen=True, kw_only=True)
class MatchConfig:
    """Which utterance becomes the context. Durations in seconds.

    ``max_group`` splits larger speaker groups into parts. ``choice: sample`` draws among the ``sample_size`` best
    candidates that satisfy the limits. ``unit_seconds`` is how much audio one unit gathers (null: from the total).
    """

    encoder: str = "resemblyzer"
    min_similarity: float = 0.6
    min_duration: float = 3.0
    max_duration: float | None = None
    batch_seconds: float = 60.0
    max_group: int | None = None
    exclude_same_text: bool = False
    choice: Literal["best", "sample"] = "best"
    sample_size: int = 5
    seed: int = 42
    unit_seconds: float | None = None

    def __post_init__(self) -> None:
        _require(-1 <= self.min_similarity <= 1, "min_similarity must be between -1 and 1")
        _require(self.min_duration >= 0, "min_duration must not be negative")
        _require(self.max_duration is None or self.max_duration >= self.min_duration,
                 "max_duration must not be less than min_duration")  # fmt: skip
        _require(self.batch_seconds > 0, "batch_seconds must be positive")
        # With 2, a group of odd size would leave an utterance alone.
        _require(self.max_group is None or self.max_group >= 3, "max_group must be at least 3")
        _require(self.sample_size >= 1, "sample_size must be at least 1")
        _require(self.unit_seconds is None or self.unit_seconds > 0, "unit_seconds must be positive")


@dataclass(frozen=True, kw_only=True)
class WriteConfig:
    """How the shards look. ``sampling_rate: null`` keeps the rate of each recording."""

    shard_size: int = 1000
    audio_format: Literal["flac", "wav", "mp3", "opus", "original"] = "flac"
    sampling_rate: int | None = None
    order: Literal["manifest", "speaker", "shuffle"] = "shuffle"
    seed: int = 42

    def __post_init__(self) -> None:
        _require(self.shard_size > 0, "shard_size must be positive")
        _require(self.sampling_rate is None or self.sampling_rate > 0, "sampling_rate must be positive")
        _require(self.seed >= 0, "seed must not be negative")


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """One codec: ``name`` names its folder in the dataset (``codes_<name>``), ``model`` what is loaded."""

    name: str
    model: str

    def __post_init__(self) -> None:
        _require(
            bool(_NAME.fullmatch(self.name)),
            f"codec name {self.name!r} must be letters, digits, '_', '-', '.'",
        )


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """Which codecs' codes the dataset has."""

    codecs: list[CodecConfig] = field(default_factory=lambda: [CodecConfig(name="builtin", model="builtin")])
    batch_seconds: float = 30.0

    def __post_init__(self) -> None:
        _require(self.batch_seconds > 0, "batch_seconds must be positive")
        names = [codec.name for codec in self.codecs]
        _require(len(set(names)) == len(names), "two codecs have the same name")


@dataclass(frozen=True, kw_only=True)
class ValidateConfig:
    """What the checker looks at beside the default level.

    ``deep`` decodes all audio; ``recheck_codes`` is the share of segments that are encoded again, such as ``0.001`` or
    ``0.1%``; ``codec_models`` says, by codec, where its model is now; ``against_sources`` accounts for every record of
    the sources.
    """

    deep: bool = False
    recheck_codes: float | str = 0.0
    codec_models: dict[str, str] = field(default_factory=dict)
    against_sources: bool = False

    def __post_init__(self) -> None:
        _require(0 <= self.recheck_share <= 1, "recheck_codes must be a share between 0 and 1, or a percentage")

    @property
    def recheck_share(self) -> float:
        """``recheck_codes`` as a number; -1 where it is none."""
        text = str(self.recheck_codes).strip()
        try:
            return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            return -1.0


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """Where the stages run. The other keys are for ``kind: ray``.

    ``address`` is that of the cluster; ``cores`` are set aside for each worker. ``device: auto`` is a GPU for each
    worker of match and encode where the cluster has any when the stage begins; ``cuda`` waits for GPU nodes.
    """

    kind: Literal["local", "ray"] = "local"
    workers: int | Literal["auto"] = "auto"
    address: str = "auto"
    cores: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        _require(self.workers == "auto" or int(self.workers) >= 1, "workers must be 'auto' or a number from 1")
        _require(self.cores >= 1, "cores must be at least 1")
        for_ray = (self.address, self.cores, self.device) != ("auto", 1, "auto")
        _require(self.kind == "ray" or not for_ray, "address, cores and device are for kind: ray")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Curves of throughput and rejects per rank: TensorBoard files in the run directory, a Weights & Biases project."""

    tensorboard: bool = False
    wandb_project: str | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """One dataset, from its manifests to its shards."""

    name: str
    run_dir: str
    dataset_dir: str
    sources: list[SourceConfig]
    speaker_key: str = "speaker"
    max_reject_fraction: float = 0.5
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    match: MatchConfig = field(default_factory=MatchConfig)
    write: WriteConfig = field(default_factory=WriteConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        _require(bool(_NAME.fullmatch(self.name)), f"name {self.name!r} must be letters, digits, '_', '-', '.'")
        # An empty path would be the current folder.
        _require(bool(self.run_dir.strip()), "run_dir must not be empty")
        _require(bool(self.dataset_dir.strip()), "dataset_dir must not be empty")
        _require(bool(self.sources), "sources must name at least one manifest")
        _require(0 <= self.max_reject_fraction <= 1, "max_reject_fraction must be between 0 and 1")
