"""Limits on the content of checkpoints.

The configuration in a checkpoint names classes to instantiate and files to load. NeMo has a list of allowed names, but
the list includes functions and models that write files, remove folders or load code from a hub. This module allows only
the classes of speech codecs, speaker models and speech recognisers.
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
# Weights hardly compress, so an archive whose content is much larger than the archive is not a checkpoint, unless it is
# small.
_MAX_RATIO: Final = 4
_FREE_BYTES: Final = 1 << 30
_MAX_MEMBERS: Final = 10_000
# Keys that only training uses: data, losses and auxiliary models.
_TRAINING_ONLY: Final = re.compile(
    r"(train|val|validation|test|log)_\w+|\w+_ds|optim|spec_augment|discriminator|labels|exp_manager|trainer"
    r"|slm_\w+|use_slm_loss|use_scl_loss|mmd_(time_)?loss"
)
_TTS: Final = "nemo.collections.tts"
_ASR: Final = "nemo.collections.asr"
_PREPROCESSORS: Final = ("AudioToMFCCPreprocessor", "AudioToMelSpectrogramPreprocessor")
_CONVOLUTIONS: Final = (
    "ConvASRDecoder", "ConvASREncoder", "ECAPAEncoder", "ParallelConvASREncoder", "SpeakerDecoder",
)  # fmt: skip
_TRANSDUCERS: Final = ("RNNTDecoder", "RNNTJoint")
_RECOGNISERS: Final = {
    "ctc_models": "EncDecCTCModel", "ctc_bpe_models": "EncDecCTCModelBPE", "rnnt_models": "EncDecRNNTModel",
    "rnnt_bpe_models": "EncDecRNNTBPEModel", "hybrid_rnnt_ctc_models": "EncDecHybridRNNTCTCModel",
    "hybrid_rnnt_ctc_bpe_models": "EncDecHybridRNNTCTCBPEModel",
}  # fmt: skip
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
    f"{_ASR}.modules": ("ConformerEncoder", *_PREPROCESSORS, *_CONVOLUTIONS, *_TRANSDUCERS),
    f"{_ASR}.modules.rnnt": _TRANSDUCERS,
    f"{_ASR}.modules.audio_preprocessing": _PREPROCESSORS,
    f"{_ASR}.modules.conformer_encoder": ("ConformerEncoder",),
    f"{_ASR}.modules.conv_asr": _CONVOLUTIONS,
    f"{_ASR}.losses.angularloss": ("AngularSoftmaxLoss",),
    "nemo.collections.common.losses": ("CrossEntropyLoss",),
    "nemo.collections.common.losses.cross_entropy": ("CrossEntropyLoss",),
}  # fmt: skip
_ALLOWED: Final = frozenset(f"{module}.{name}" for module, names in _CLASSES.items() for name in names)
# Classes that the key ``target`` of a whole configuration may name, but none of its parts.
_WHOLE: Final = frozenset(f"{_ASR}.models.{module}.{name}" for module, name in _RECOGNISERS.items())
_LAYER: Final = re.compile(r"torch\.nn\.[A-Z][A-Za-z0-9]*")
# Keys that name a class: in Hydra, and in older and newer configurations of NeMo.
_TARGET_KEYS: Final = ("_target_", "target", "cls")
# Maximum sizes of mel filter banks. The banks are made outside torch, where the limit on layers does not apply.
_MAX_BANDS: Final = {"n_fft": 1 << 16, "features": 1 << 12, "n_mels": 1 << 12, "mel_dim": 1 << 12}
# Name of a file that lies in the archive beside the configuration, such as the model of a tokenizer.
_MEMBER: Final = re.compile(r"nemo:[^./\\][^/\\]*")
_PATH: Final = re.compile(r"(nemo:)?([/~]|\.\.?/|.*(/\.\.|://))|.*\$\{", re.DOTALL)
# Matches a file name without folders that is not hidden; checksums ignore hidden files.
_PLAIN_NAME: Final = re.compile(r"[^./\\][^/\\]*")
TRANSFORMERS_TYPES: Final[tuple[str, ...]] = ("dac", "encodec", "mimi")
_ADAPTER: Final = "adapter_config.json"
_MAX_CONFIG_BYTES: Final = 16 << 20


def refuse_packed_weights(stream: IO[bytes], num_bytes: int, origin: str) -> None:
    """Raise ConfigError if the tensors in a torch file would take more memory than the file has bytes.

    torch stores tensors uncompressed in a zip archive. A manipulated archive could compress them or let them overlap.
    """
    try:
        with zipfile.ZipFile(stream) as weights:
            unpacked = sum(info.file_size for info in weights.infolist())
    except (zipfile.BadZipFile, NotImplementedError):
        return  # the file has an older format, or damage that torch reports
    if unpacked > num_bytes:
        raise ConfigError(
            f"{origin} is not loaded: its weights would unpack from {num_bytes:,} to {unpacked:,} bytes, but torch "
            "never compresses weights",
            code="untrusted_model",
        )


def read_nemo_config(path: Path, allow_targets: Collection[str] = ()) -> dict[str, Any]:
    """Return the configuration in a .nemo file or in its unpacked folder, without keys for training.

    Args:
        path: the file or folder.
        allow_targets: further values and keys that are allowed, such as names of classes.

    Raises:
        ConfigError: the path is not a checkpoint, its content is too large, or its configuration has forbidden values.
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
        raise ConfigError(
            f"{path}: its configuration is damaged, or contains more than plain values", code="bad_model"
        ) from error
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a NeMo checkpoint, which is a tar archive: {one_line(error)}", code="bad_model"
        ) from error
    if "model" in config:
        config = config["model"]
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a NeMo checkpoint: its configuration is not a mapping", code="bad_model")
    config = {key: value for key, value in config.items() if not _TRAINING_ONLY.fullmatch(str(key))}
    for key, value in _walk(config, ""):
        name = key.rpartition(".")[2]
        if key == "target" and value in _WHOLE:
            continue
        if name not in allow_targets and str(value) not in allow_targets and (what := _find_fault(name, value)):
            raise ConfigError(
                f"{path} is not loaded, because {key} in its configuration is {str(value)[:200]!r}, {what}; "
                "if you trust the model, add this value or key to allow_targets next to the model's name in the "
                "configuration",
                code="untrusted_model",
            )
    return config


def _read_archive(path: Path) -> dict[Any, Any]:
    """Return the configuration in an archive, and check the archive without unpacking it.

    Raises:
        tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError: it is not an intact archive.
        ConfigError: a member is missing, or the content is too large.
    """
    config: dict[Any, Any] = {}
    missing, size = {_CONFIG, _WEIGHTS}, 0
    limit = max(_FREE_BYTES, _MAX_RATIO * path.stat().st_size)
    with tarfile.open(path) as archive:
        for number, member in enumerate(archive):
            size += member.size
            if size > limit or number >= _MAX_MEMBERS:
                raise ConfigError(
                    f"{path} is not loaded: it would unpack to more than {limit >> 20:,} MiB or {_MAX_MEMBERS:,} files",
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
    """Yield the dotted key and the value of each entry of a configuration, at any depth.

    The value of a mapping or list is yielded as "", or as None if it is empty.
    """
    if isinstance(value, (dict, list)):
        yield key, "" if value else None
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _find_fault(name: str, value: Any) -> str | None:
    """Return why a value is forbidden; None if it is allowed. ``name`` is the last part of its key."""
    if name == "_target_" or (name in _TARGET_KEYS and isinstance(value, str)):
        if str(value) not in _ALLOWED and not _LAYER.fullmatch(str(value)):
            return "which is not a known part of codecs and speech models"
    elif value is None or value is False:
        return None
    elif name == "trust_remote_code" or name.startswith("init_from_"):
        return "which loads files beyond the checkpoint"
    elif isinstance(value, str) and (
        _PATH.match(value) or (name.endswith("_path") and value and not _MEMBER.fullmatch(value))
    ):
        return "which lies outside the checkpoint"
    elif isinstance(value, (int, float)) and value > _MAX_BANDS.get(name, value):
        return "more than any speech model has"
    return None


def check_transformers_config(path: Path) -> None:
    """Raise ConfigError unless a directory's config.json describes a supported codec and loads nothing else."""
    problem = "it has an adapter_config.json, which loads another model" if (path / _ADAPTER).exists() else None
    config = _read_json(path / "config.json")
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type not in TRANSFORMERS_TYPES:
        raise ConfigError(
            f"{path} contains a model of type {model_type!r}; supported types: {', '.join(TRANSFORMERS_TYPES)}",
            code="bad_model",
        )
    if problem := problem or _find_external_file(config):
        raise ConfigError(
            f"{path} is not loaded: {problem}; remove this if you trust the rest of the model", code="untrusted_model"
        )
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
    """Yield the weight files that an index names; raise ConfigError if one may lie outside the directory."""
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


def _find_external_file(config: dict[str, Any]) -> str | None:
    """Describe a key of a config.json, at any depth, that loads files from elsewhere; None if there is no such key."""
    for key, value in config.items():
        is_elsewhere = key == "transformers_weights" and not _PLAIN_NAME.fullmatch(str(value))
        if (
            is_elsewhere
            or key in ("quantization_config", "use_kernels")
            or ("attn_implementation" in key and "/" in str(value))
        ):
            return f"{key} in its config.json loads files from outside the directory"
        if isinstance(value, dict) and (found := _find_external_file(value)):
            return found
    return None
