"""The typed configuration of one dataset: dataclasses, YAML, ``key=value`` overrides.

An unknown key or a wrong type is a ConfigError that names the key, the file and the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from sharmill.errors import ConfigError

STAGES = ("prepare", "match", "write", "encode", "validate")
STAGE_ALIASES = {"stage1": "match", "stage2": "write", "stage3": "encode"}

Loaded = TypeVar("Loaded")

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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies ``key=value`` overrides (``match.min_similarity=0.7``) and checks everything.

    Raises:
        ConfigError: with the file, the key and what to change.
    """
    return load_typed(Config, path, overrides)


def load_typed(kind: type[Loaded], path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """A YAML file as the dataclass ``kind``, with the same overrides, checks and errors as a configuration."""
    return _to_typed(kind, _read_merged(kind, Path(path), overrides), str(path))


def to_config(values: dict[str, Any], origin: str) -> Config:
    """The typed configuration of plain values that came from ``origin``."""
    return _to_typed(Config, values, origin)


def to_yaml(config: Config) -> bytes:
    """The whole configuration, with its defaults, as YAML that ``load_config`` reads."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))).encode()


def resolve_stage(name: str) -> str:
    """The stage of a name or an alias (``stage1``).

    Raises:
        ConfigError: there is no such stage.
    """
    stage = STAGE_ALIASES.get(name, name)
    if stage not in STAGES:
        raise ConfigError(f"there is no stage {name!r}{nearest(name, [*STAGES, *STAGE_ALIASES])}")
    return stage


def _read_merged(kind: type, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from sharmill.yaml_limits import check_yaml

    try:
        check_yaml(path)
        config = OmegaConf.load(path)
        for override in overrides:
            key, _, value = override.partition("=")
            OmegaConf.update(config, key, _override_value(value, _type_at(kind, key)))
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except (OmegaConfBaseException, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys to values")
    return typing.cast("dict[str, Any]", values)


def _to_typed(kind: type[Loaded], values: dict[str, Any], origin: str) -> Loaded:
    _check_keys(kind, values, origin, "")
    try:
        # Not strict: a number may be quoted, and YAML takes 1e3 for text.
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_readable(kind, str(error))}") from error


def _override_value(text: str, expected: Any) -> Any:
    """What the right side of an override means: YAML, or the text itself where text is asked for.

    ``name=0123`` is a name, and what is no YAML is text as well: ``prepare.filters.cer=>= 3``, ``speaker_key=[^/]+``.
    """
    import yaml

    if expected is str and text and text[0] not in "'\"":
        # Text as it stands, be it like a number or with a '#' in it.
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if expected is str and value is not None and not isinstance(value, str) else value


def _type_at(kind: type, key: str) -> Any:
    """The type declared for a key such as ``sources[0].manifest`` or ``sources.0.manifest``; None if there is none."""
    owner: Any = kind
    for part in re.findall(r"[^.\[\]]+", key):
        if typing.get_origin(owner) is list:
            owner = typing.get_args(owner)[0]
            if part.isdigit():
                continue
        if dataclasses.is_dataclass(owner):
            owner = typing.get_type_hints(owner).get(part)
        else:
            owner = typing.get_args(owner)[1] if typing.get_origin(owner) is dict else None
    return owner


def _check_keys(owner: Any, values: Any, origin: str, prefix: str) -> None:
    """Walks the values beside the dataclasses and stops at the first key that no dataclass has."""
    if typing.get_origin(owner) is list and isinstance(values, list):
        for number, value in enumerate(values):
            _check_keys(typing.get_args(owner)[0], value, origin, f"{prefix.rstrip('.')}[{number}].")
    if not dataclasses.is_dataclass(owner) or not isinstance(values, dict):
        return
    types = typing.get_type_hints(owner)
    for key, value in values.items():
        if key not in types:
            raise ConfigError(f"{origin}: unknown key '{prefix}{key}'{nearest(str(key), list(types))}")
        _check_keys(types[key], value, origin, f"{prefix}{key}.")


def nearest(name: str, valid: list[str]) -> str:
    """What to say after a name that is not valid: the one probably meant, or all."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    return f"; did you mean '{close[0]}'?" if close else f"; the valid names are {', '.join(valid)}"


def _readable(kind: type, message: str) -> str:
    """msgspec's ``... - at `$.match.min_similarity``` with the key first, in the words of YAML."""
    text, _, where = message.partition(" - at `$")
    where = where.strip("`.").replace("[...]", "")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        text = f"the key '{missing[1]}' is missing"
    elif invalid := re.fullmatch(r"Invalid enum value (.*)", text):
        text = f"{invalid[1]} is not one of {', '.join(_choices(_type_at(kind, where)))}"
    else:
        text = text.replace("`object`", "`mapping`").replace("`array`", "`list`")
        text = text[0].lower() + text[1:]
    return f"{where}: {text}" if where else text


def _choices(expected: Any) -> list[str]:
    """The values that a ``Literal`` allows, also as part of a union."""
    if typing.get_origin(expected) is Literal:
        return [str(value) for value in typing.get_args(expected)]
    if expected is int:
        return ["a whole number"]
    return [choice for part in typing.get_args(expected) for choice in _choices(part)]
