"""The family of the codecs in Hugging Face transformers, and the check of a directory before one is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from sharmill.errors import ConfigError, first_line
from sharmill.files.storage import open_regular
from sharmill.models.family import PATH_STARTS, ModelFamily, refuse_packed_weights
from sharmill.models.hub import require_on_hub
from sharmill.models.protocols import Codec
from sharmill.registry import require_package

TRANSFORMERS_TYPES: Final[tuple[str, ...]] = ("dac", "encodec", "mimi")
HUB_ADVICE: Final = "download the model elsewhere and give transformers:/path/of/directory"

_ADAPTER: Final = "adapter_config.json"
_MAX_CONFIG_BYTES: Final = 16 << 20


@dataclass(frozen=True, kw_only=True)
class TransformersCodec(ModelFamily):
    """``transformers:<directory or hub name>``: EnCodec without chunks, DAC and Mimi."""

    packages: ClassVar = ("transformers",)
    modules: ClassVar = ("sharmill.models.transformers_codec", "transformers.models.auto.modeling_auto")

    def resolve(self) -> Path | None:
        target, path = self.target, Path(self.target).expanduser()
        if not target:
            raise ConfigError(
                "'transformers' is incomplete: write transformers:<directory or hub name>", code="bad_model"
            )
        is_directory = path.is_dir()
        if is_directory and not (path / "config.json").is_file():
            raise ConfigError(
                f"{target} has no config.json: give a directory written by save_pretrained", code="bad_model"
            )
        if not is_directory and (path.is_file() or target.startswith(PATH_STARTS)):
            raise ConfigError(
                f"{target} is not a directory: give a directory written by save_pretrained, or a hub name",
                code="bad_model",
            )
        require_package("transformers")
        if not is_directory:
            return None
        check_transformers_config(path)
        return path

    def check(self) -> None:
        if self.resolve() is None:
            require_on_hub(self.target, "config.json", self.name, HUB_ADVICE)

    def load(self, device: str) -> Codec:
        path = self.resolve()
        from sharmill.models.transformers_codec import load_transformers_codec

        return load_transformers_codec(self.name, self.target if path is None else path, device)


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
