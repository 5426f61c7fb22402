"""Limits on the content of checkpoints.

A checkpoint's configuration names classes to make, and files to load. NeMo has a list of what it may name, but on it
are functions and models that write files, remove folders or load code from a hub. Here are only the classes that speech
codecs and speaker models are made of.
"""

import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

import yaml

from sharmill.config.loading import load_untrusted_yaml
from sharmill.errors import ConfigError, one_line
from sharmill.files.regular import open_regular

_CONFIG: Final = "model_config.yaml"
_WEIGHTS: Final = "model_weights.ckpt"
# Weights hardly compress: what unpacks to much more than its file is no checkpoint, unless it is small.
_MAX_RATIO: Final = 4
_FREE_BYTES: Final = 1 << 30
_MAX_MEMBERS: Final = 10_000
# Used in training alone: data, losses and further models of those who trained it.
_TRAINING_ONLY: Final = re.compile(
    r"(train|val|validation|test|log)_\w+|\w+_ds|optim|spec_augment|discriminator|labels|exp_manager|trainer"
    r"|slm_\w+|use_slm_loss|use_scl_loss|mmd_(time_)?loss"
)
_TTS: Final = "nemo.collections.tts"
_ASR: Final = "nemo.collections.asr"
_PREPROCESSORS: Final = ("AudioToMFCCPreprocessor", "AudioToMelSpectrogramPreprocessor")
_CONVOLUTIONS: Final = ("ConvASREncoder", "ECAPAEncoder", "ParallelConvASREncoder", "SpeakerDecoder")
_CLASSES: Final = {
    f"{_TTS}.models.audio_codec": ("AudioCodecModel",),
    f"{_TTS}.models": ("AudioCodecModel",),
    f"{_TTS}.modules.audio_codec_modules": (
        "CausalHiFiGANDecoder", "CausalHiFiGANEncoder", "FiniteScalarQuantizer", "FullBandMelEncoder",
        "GroupFiniteScalarQuantizer", "HiFiGANDecoder", "HiFiGANEncoder", "MelSpectrogramProcessor",
        "MultiBandMelEncoder", "MultiResolutionSTFTEncoder", "ResNetDecoder", "ResNetEncoder", "STFTProcessor",
    ),
    f"{_TTS}.modules.encodec_modules": (
        "GroupResidualVectorQuantizer", "ResidualVectorQuantizer", "SEANetDecoder", "SEANetEncoder",
    ),
    f"{_TTS}.losses.audio_codec_loss": (
        "DiscriminatorHingedLoss", "DiscriminatorSquaredLoss", "GeneratorHingedLoss", "GeneratorSquaredLoss",
    ),
    f"{_ASR}.models.label_models": ("EncDecSpeakerLabelModel",),
    f"{_ASR}.models": ("EncDecSpeakerLabelModel",),
    f"{_ASR}.modules": ("ConformerEncoder", *_PREPROCESSORS, *_CONVOLUTIONS),
    f"{_ASR}.modules.audio_preprocessing": _PREPROCESSORS,
    f"{_ASR}.modules.conformer_encoder": ("ConformerEncoder",),
    f"{_ASR}.modules.conv_asr": _CONVOLUTIONS,
    f"{_ASR}.losses.angularloss": ("AngularSoftmaxLoss",),
    "nemo.collections.common.losses": ("CrossEntropyLoss",),
    "nemo.collections.common.losses.cross_entropy": ("CrossEntropyLoss",),
}  # fmt: skip
_ALLOWED: Final = frozenset(f"{module}.{name}" for module, names in _CLASSES.items() for name in names)
_LAYER: Final = re.compile(r"torch\.nn\.[A-Z][A-Za-z0-9]*")
# The spellings of Hydra, and of NeMo's older and newer configurations.
_TARGET_KEYS: Final = ("_target_", "target", "cls")
# Largest sizes of the matrices from spectra to bands, which are made outside of torch.
_MOST_BANDS: Final = {"n_fft": 1 << 16, "features": 1 << 12, "n_mels": 1 << 12, "mel_dim": 1 << 12}
_PATH: Final = re.compile(r"(nemo:)?([/~]|\.\.?/|.*(/\.\.|://))|.*\$\{", re.DOTALL)
# Neither hidden, which checksums leave out, nor in another folder.
_PLAIN_NAME: Final = re.compile(r"[^./\\][^/\\]*")
TRANSFORMERS_TYPES: Final[tuple[str, ...]] = ("dac", "encodec", "mimi")
_ADAPTER: Final = "adapter_config.json"
_MAX_CONFIG_BYTES: Final = 16 << 20


def refuse_packed_weights(stream: IO[bytes], num_bytes: int, origin: str) -> None:
    """Raise ConfigError where tensors in a file of torch's would take more memory than the file has bytes.

    Torch stores them as they are, in an archive that could have them compressed, or one over the other.
    """
    try:
        with zipfile.ZipFile(stream) as weights:
            unpacked = sum(info.file_size for info in weights.infolist())
    except (zipfile.BadZipFile, NotImplementedError):
        return  # of an older form, or damaged, which torch says
    if unpacked > num_bytes:
        raise ConfigError(
            f"{origin} is not loaded: its weights would unpack to {unpacked:,} bytes from {num_bytes:,}, and torch "
            "itself packs none",
            code="untrusted_model",
        )


def read_nemo_config(path: Path, allow_targets: Collection[str] = ()) -> dict[str, Any]:
    """Return the configuration in a .nemo file, or in the folder of an unpacked one, without what only trains.

    Args:
        path: the file or folder.
        allow_targets: names of classes and functions, or other values, that are let through.

    Raises:
        ConfigError: it is no checkpoint, unpacks to too much, or its configuration has what is not let through.
    """
    try:
        if path.is_dir():
            with open_regular(path / _CONFIG) as stream:
                config = load_untrusted_yaml(stream, f"the configuration in {path}")
            weights = path / _WEIGHTS
            with open_regular(weights) as stream:
                refuse_packed_weights(stream, weights.stat().st_size, str(weights))
        else:
            config = _read_archive(path)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: its configuration is damaged, or more than values", code="bad_model") from error
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a NeMo checkpoint, which is a tar archive: {one_line(error)}", code="bad_model"
        ) from error
    if "model" in config:
        config = config["model"]
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a NeMo checkpoint: its configuration is no mapping", code="bad_model")
    config = {key: value for key, value in config.items() if not _TRAINING_ONLY.fullmatch(str(key))}
    for key, value in _walk(config, ""):
        name = key.rpartition(".")[2]
        if name not in allow_targets and str(value) not in allow_targets and (what := _refused(name, value)):
            raise ConfigError(
                f"{path} is not loaded, since {key} of its configuration is {str(value)[:200]!r}, {what}; "
                "if you trust the model, add this value or key to allow_targets beside its name in the configuration",
                code="untrusted_model",
            )
    return config


def _read_archive(path: Path) -> dict[Any, Any]:
    """Return the configuration in an archive whose members are looked at without unpacking them.

    Raises:
        tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError: it is no archive, or damaged.
        ConfigError: it lacks something, or has too much.
    """
    config: dict[Any, Any] = {}
    missing, size = {_CONFIG, _WEIGHTS}, 0
    limit = max(_FREE_BYTES, _MAX_RATIO * path.stat().st_size)
    with tarfile.open(path) as archive:
        for number, member in enumerate(archive):
            size += member.size
            if size > limit or number >= _MAX_MEMBERS:
                raise ConfigError(
                    f"{path} would unpack to more than {limit >> 20:,} MiB or {_MAX_MEMBERS:,} files: it is not loaded",
                    code="untrusted_model",
                )
            name = PurePosixPath(member.name).name
            if name == _CONFIG and (stream := archive.extractfile(member)) is not None:
                config = load_untrusted_yaml(stream, f"the configuration in {path}")
            if name == _WEIGHTS and (stream := archive.extractfile(member)) is not None:
                refuse_packed_weights(stream, member.size, str(path))
            missing.discard(name)
    if missing:
        raise ConfigError(
            f"{path} is not a NeMo checkpoint: the archive lacks {' and '.join(sorted(missing))}", code="bad_model"
        )
    return config


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of everything in a configuration but mappings and lists."""
    if isinstance(value, (dict, list)):
        yield key, "" if value else None
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _refused(name: str, value: Any) -> str | None:
    """Describe what is wrong with a key, the last part of it, and its value."""
    if name == "_target_" or (name in _TARGET_KEYS and isinstance(value, str)):
        if str(value) not in _ALLOWED and not _LAYER.fullmatch(str(value)):
            return "which is none of the classes that codecs and speaker models are made of"
    elif value is None or value is False:
        return None
    elif name == "trust_remote_code" or name.startswith("init_from_"):
        return "which loads more than the checkpoint"
    elif isinstance(value, str) and (_PATH.match(value) or (name.endswith("_path") and value)):
        return "which is outside the checkpoint"
    elif isinstance(value, (int, float)) and value > _MOST_BANDS.get(name, value):
        return "more than any speech model has"
    return None


def check_transformers_config(path: Path) -> None:
    """Raise ConfigError unless a directory's config.json names a codec that is supported, and loads nothing else."""
    problem = "it has an adapter_config.json, by which another model is loaded" if (path / _ADAPTER).exists() else None
    config = _read_json(path / "config.json")
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type not in TRANSFORMERS_TYPES:
        raise ConfigError(
            f"{path} holds a model of type {model_type!r}: supported are {', '.join(TRANSFORMERS_TYPES)}",
            code="bad_model",
        )
    if problem := problem or _refused_in(config):
        raise ConfigError(f"{path} is not loaded: {problem}; remove that if you trust the rest", code="untrusted_model")
    named = [path / name for index in sorted(path.rglob("*.index.json")) for name in _indexed_weights(index)]
    for weights in sorted({*path.rglob("*.bin"), *named}):
        if weights.is_file():
            with open_regular(weights) as stream:
                refuse_packed_weights(stream, weights.stat().st_size, str(weights))


def _read_json(path: Path) -> Any:
    try:
        with open_regular(path) as stream:
            return json.loads(stream.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}", code="bad_model") from error


def _indexed_weights(index: Path) -> Iterator[str]:
    """Yield the files of weights that an index names; raise ConfigError for one that may lie outside the directory."""
    found = _read_json(index)
    weights = found.get("weight_map") if isinstance(found, dict) else None
    for name in weights.values() if isinstance(weights, dict) else [None]:
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise ConfigError(
                f"{index} is not loaded: it names {str(name)[:200]!r} as weights, which is not the name of a file in "
                "the directory of the model",
                code="untrusted_model",
            )
        yield name


def _refused_in(config: dict[str, Any]) -> str | None:
    """Name what in a config.json, at any depth, loads more than the directory; None without such a thing."""
    for key, value in config.items():
        is_elsewhere = key == "transformers_weights" and not _PLAIN_NAME.fullmatch(str(value))
        if (
            is_elsewhere
            or key in ("quantization_config", "use_kernels")
            or ("attn_implementation" in key and "/" in str(value))
        ):
            return f"{key} of its config.json loads more than the directory"
        if isinstance(value, dict) and (found := _refused_in(value)):
            return found
    return None
