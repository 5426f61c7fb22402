"""The families of models that sharmill brings: how their names are written, checked, identified, and what loads them.

Each is an entry of a registry in ``sharmill.registry``. Nothing heavy is imported before a model is loaded.
"""

from __future__ import annotations

import importlib.metadata
import json
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import xxhash

from sharmill.errors import ConfigError
from sharmill.files.storage import open_regular
from sharmill.models.hub import require_on_hub
from sharmill.registry import require_package

if TYPE_CHECKING:
    from nemo.core import ModelPT

    from sharmill.models.protocols import Codec, SpeakerEncoder

BUILTIN_FILE: Final = Path(__file__).parent / "builtin_codec.nemo"
TRANSFORMERS_TYPES: Final[tuple[str, ...]] = ("dac", "encodec", "mimi")

_PATH_STARTS: Final[tuple[str, ...]] = ("/", "./", "../", "~")
_ADAPTER: Final = "adapter_config.json"
_READ_BYTES: Final = 1 << 20
_MAX_CONFIG_BYTES: Final = 16 << 20
_SHOWN_CHARACTERS: Final = 200

# Measured on read speech: 99.8 % of pairs of one speaker are at least as similar (10 speakers, 450 pairs), and of pairs
# of different speakers 0.2 % (10 speakers, 4,500 pairs) and 3.2 % (248 speakers, 30,628 pairs). At 0.6 it is 23 % and
# 47 %.
_RESEMBLYZER_MIN_SIMILARITY: Final = 0.75
# The same 30,628 pairs: a similarity, and the share of pairs that are less similar.
_RESEMBLYZER_STRANGERS: Final = (
    (0.296, 0.0), (0.434, 0.01), (0.477, 0.05), (0.502, 0.1), (0.532, 0.2), (0.555, 0.3), (0.576, 0.4), (0.595, 0.5),
    (0.615, 0.6), (0.637, 0.7), (0.664, 0.8), (0.701, 0.9), (0.732, 0.95), (0.759, 0.975), (0.785, 0.99),
    (0.8, 0.995), (0.821, 0.998), (0.833, 0.999), (0.852, 0.9995), (0.88, 0.9999), (0.9, 1.0),
)  # fmt: skip
# Of the published scripts that choose contexts with TitaNet.
_TITANET_MIN_SIMILARITY: Final = 0.6


@dataclass(frozen=True, kw_only=True)
class ModelName:
    """A model name as a configuration gives it, ``family`` or ``family:target``.

    Args:
        name: the whole name, for messages.
        target: what follows the colon.
        path: the local file or directory that the target is, or None for a name to be looked up elsewhere.
        allow_targets: what a NeMo checkpoint may name beside the known classes.
    """

    name: str
    target: str
    path: Path | None
    allow_targets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, called with a target and a device to load one.

    Args:
        load: (target, device) -> the model; NeMo's take ``allow_targets`` as well, as does ``describe``.
        describe: target -> what identifies the model beside its name; raises ConfigError for a target that cannot be
            loaded for a reason that can be seen without loading.
        require: target -> nothing; raises ConfigError within seconds for a model that is neither on this machine nor to
            be had from elsewhere. It may import NeMo, and is asked only before a stage that loads the model.
        min_similarity: target -> the least similarity of two utterances that an encoder takes for one voice, or None
            where none is known.
        strangers: similarities of two utterances of different speakers, in increasing order, each with the share of
            pairs that are less similar; empty where none were measured.
        modules: those that ``load`` imports, and that take the most time to import.
    """

    load: Callable[..., Any]
    describe: Callable[..., dict[str, str]]
    require: Callable[[str], None] = lambda target: None
    min_similarity: Callable[[str], float | None] = lambda target: None
    strangers: tuple[tuple[float, float], ...] = ()
    modules: tuple[str, ...] = ()

    def __call__(self, target: str, device: str, **trust: tuple[str, ...]) -> Any:
        """Load a model on a torch device."""
        return self.load(target, device, **trust)


def _no_target(form: str, target: str) -> None:
    if target:
        raise ConfigError(f"'{form}:{target}' has too much: write {form}", code="bad_model")


def _describe_resemblyzer(target: str) -> dict[str, str]:
    _no_target("resemblyzer", target)
    try:
        return {"version": importlib.metadata.version("resemblyzer")}
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "the package resemblyzer is not installed: run pip install resemblyzer", code="missing_package"
        ) from None


def _load_resemblyzer(target: str, device: str) -> SpeakerEncoder:
    _no_target("resemblyzer", target)
    from sharmill.models.resemblyzer_encoder import ResemblyzerEncoder

    return ResemblyzerEncoder(device)


def _describe_builtin(target: str) -> dict[str, str]:
    _no_target("builtin", target)
    return {"checksum": file_checksum(BUILTIN_FILE)}


def _load_builtin(target: str, device: str) -> Codec:
    _no_target("builtin", target)
    from sharmill.models.builtin_codec import load_builtin_codec

    return load_builtin_codec(device)


def _nemo_name(target: str, allow_targets: tuple[str, ...] = ()) -> ModelName:
    name = f"nemo:{target}"
    if not target:
        raise ConfigError(
            "'nemo' is incomplete: write nemo:<pretrained name or path of a .nemo file>", code="bad_model"
        )
    if not target.endswith(".nemo"):
        if target.startswith(_PATH_STARTS):
            raise ConfigError(
                f"{target} is not a .nemo file: give the path of one, or the name of a pretrained model",
                code="bad_model",
            )
        return ModelName(name=name, target=target, path=None, allow_targets=allow_targets)
    path = Path(target).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no file {target}: correct the path of the .nemo checkpoint", code="bad_model")
    return ModelName(name=name, target=target, path=path, allow_targets=allow_targets)


def _describe_nemo(target: str, allow_targets: tuple[str, ...] = ()) -> dict[str, str]:
    path = _nemo_name(target).path
    require_package("nemo")
    if path is None:
        return {}
    from sharmill.models.nemo_config import read_nemo_config

    read_nemo_config(path, allow_targets)
    return {"checksum": file_checksum(path)}


def _require_nemo(find_class: Callable[[], type[ModelPT]]) -> Callable[[str], None]:
    def require(target: str) -> None:
        name = _nemo_name(target)
        if name.path is None:
            from sharmill.models.nemo_checkpoint import require_pretrained

            require_pretrained(find_class, name)

    return require


def _nemo_encoder_class() -> type[ModelPT]:
    from nemo.collections.asr.models import EncDecSpeakerLabelModel

    return EncDecSpeakerLabelModel


def _nemo_codec_class() -> type[ModelPT]:
    from nemo.collections.tts.models import AudioCodecModel

    return AudioCodecModel


def _load_nemo_encoder(target: str, device: str, allow_targets: tuple[str, ...] = ()) -> SpeakerEncoder:
    name = _nemo_name(target, allow_targets)
    from sharmill.models.nemo_speaker import load_nemo_speaker_encoder

    return load_nemo_speaker_encoder(name, device)


def _nemo_min_similarity(target: str) -> float | None:
    return _TITANET_MIN_SIMILARITY if "titanet" in Path(target).name.lower() else None


def _load_nemo_codec(target: str, device: str, allow_targets: tuple[str, ...] = ()) -> Codec:
    name = _nemo_name(target, allow_targets)
    from sharmill.models.nemo_codec import load_nemo_codec

    return load_nemo_codec(name, device)


def _transformers_name(target: str) -> ModelName:
    name = f"transformers:{target}"
    if not target:
        raise ConfigError("'transformers' is incomplete: write transformers:<directory or hub name>", code="bad_model")
    path = Path(target).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{target} has no config.json: give a directory written by save_pretrained", code="bad_model"
            )
        return ModelName(name=name, target=target, path=path)
    if path.is_file() or target.startswith(_PATH_STARTS):
        raise ConfigError(
            f"{target} is not a directory: give a directory written by save_pretrained, or a hub name",
            code="bad_model",
        )
    return ModelName(name=name, target=target, path=None)


def _describe_transformers(target: str) -> dict[str, str]:
    path = _transformers_name(target).path
    require_package("transformers")
    if path is None:
        return {}
    check_transformers_config(path)
    return {"checksum": directory_checksum(path)}


def _require_transformers(target: str) -> None:
    name = _transformers_name(target)
    if name.path is None:
        advice = "download the model elsewhere and give transformers:/path/of/directory"
        require_on_hub(target, "config.json", name.name, advice)


def _load_transformers(target: str, device: str) -> Codec:
    name = _transformers_name(target)
    from sharmill.models.transformers_codec import load_transformers_codec

    return load_transformers_codec(name, device)


RESEMBLYZER: Final = Family(
    load=_load_resemblyzer,
    describe=_describe_resemblyzer,
    min_similarity=lambda target: _RESEMBLYZER_MIN_SIMILARITY,
    strangers=_RESEMBLYZER_STRANGERS,
    modules=("sharmill.models.resemblyzer_encoder",),
)
NEMO_ENCODERS: Final = Family(
    load=_load_nemo_encoder,
    describe=_describe_nemo,
    require=_require_nemo(_nemo_encoder_class),
    min_similarity=_nemo_min_similarity,
    modules=("sharmill.models.nemo_speaker", "nemo.collections.asr.models"),
)
BUILTIN: Final = Family(load=_load_builtin, describe=_describe_builtin, modules=("sharmill.models.builtin_codec",))
NEMO_CODECS: Final = Family(
    load=_load_nemo_codec,
    describe=_describe_nemo,
    require=_require_nemo(_nemo_codec_class),
    modules=("sharmill.models.nemo_codec", "nemo.collections.tts.models"),
)
TRANSFORMERS_CODECS: Final = Family(
    load=_load_transformers,
    describe=_describe_transformers,
    require=_require_transformers,
    modules=("sharmill.models.transformers_codec", "transformers.models.auto.modeling_auto"),
)


def check_transformers_config(path: Path) -> None:
    """Raise ConfigError unless a directory's config.json names a codec that is supported, and loads nothing else."""
    problem = "it has an adapter_config.json, by which another model is loaded" if (path / _ADAPTER).exists() else None
    try:
        with open_regular(path / "config.json") as stream:
            config = json.loads(stream.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path / 'config.json'} cannot be read: {first_line(error)}", code="bad_model") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type not in TRANSFORMERS_TYPES:
        raise ConfigError(
            f"{path} holds a model of type {model_type!r}: supported are {', '.join(TRANSFORMERS_TYPES)}",
            code="bad_model",
        )
    if problem := problem or _refused_in(config):
        raise ConfigError(f"{path} is not loaded: {problem}; remove that if you trust the rest", code="untrusted_model")
    for weights in sorted(path.glob("*.bin")):
        if weights.is_file():
            with open_regular(weights) as stream:
                refuse_packed_weights(stream, weights.stat().st_size, str(weights))


def _refused_in(config: dict[str, Any]) -> str | None:
    """Name what in a config.json, at any depth, loads more than the directory; None without such a thing."""
    for key, value in config.items():
        if key in ("quantization_config", "use_kernels") or ("attn_implementation" in key and "/" in str(value)):
            return f"{key} of its config.json loads more than the directory"
        if isinstance(value, dict) and (found := _refused_in(value)):
            return found
    return None


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


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files of a directory."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def file_checksum(path: Path) -> str:
    """Return the xxh3 (16 hex digits) of a file's bytes."""
    return _checksum([path], path.parent, with_names=False)


def directory_checksum(path: Path) -> str:
    """Return the xxh3 (16 hex digits) of the names, sizes and bytes of a directory's files, hidden ones left out.

    Download tools keep their own notes, with times in them, in hidden folders beside the model.
    """
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    seen = [files[name] for name in sorted(files) if "/." not in f"/{name}"]
    return _checksum(seen, path, with_names=True)


def _checksum(files: Iterable[Path], root: Path, *, with_names: bool) -> str:
    digest = xxhash.xxh3_64()
    for file in files:
        if with_names:
            digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
        with open_regular(file) as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for a message of one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_SHOWN_CHARACTERS]
