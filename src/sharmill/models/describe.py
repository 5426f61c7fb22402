"""What identifies a model, found without loading it: for the identity of a plan, and for checks before any work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import tarfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from sharmill.errors import ConfigError
from sharmill.models.names import ModelName, parse_codec_name, parse_speaker_encoder_name

if TYPE_CHECKING:
    from collections.abc import Iterable

BUILTIN_CONFIG: Final = Path(__file__).parent / "untrained_codec.yaml"
TRANSFORMERS_CODECS: Final[tuple[str, ...]] = ("dac", "encodec", "mimi")

_NEMO_MEMBERS: Final = frozenset({"model_config.yaml", "model_weights.ckpt"})
_READ_BYTES: Final = 1 << 20


def describe_speaker_encoder(name: str) -> dict[str, str]:
    """What identifies a speaker encoder, and an early check of its name.

    Returns:
        ``backend`` and ``name``; for a local file also ``checksum`` (xxh3 of its bytes), for resemblyzer the
        ``version`` of the package, which brings the weights.

    Raises:
        ConfigError: if the name cannot be loaded for a reason that can be seen now; its message says what to do.
    """
    return _describe(parse_speaker_encoder_name(name))


def describe_codec(name: str) -> dict[str, str]:
    """What identifies a codec, and an early check of its name.

    Returns:
        ``backend`` and ``name``; for a local file or directory, and for the configuration of the built-in codec, also
        ``checksum`` (xxh3 of the bytes; of a directory's files in sorted order).

    Raises:
        ConfigError: if the name cannot be loaded for a reason that can be seen now; its message says what to do.
    """
    return _describe(parse_codec_name(name))


def _describe(model: ModelName) -> dict[str, str]:
    described = {"backend": model.backend, "name": model.name}
    if model.backend == "resemblyzer":
        return described | {"version": _resemblyzer_version()}
    require_package("transformers" if model.backend == "transformers" else "nemo")
    if model.backend == "builtin":
        return described | {"checksum": file_checksum(BUILTIN_CONFIG)}
    if model.path is None:
        return described
    if model.backend == "nemo":
        check_nemo_archive(model.path)
        return described | {"checksum": file_checksum(model.path)}
    check_transformers_config(model.path)
    return described | {"checksum": directory_checksum(model.path)}


def require_package(package: str) -> None:
    """Raises ConfigError, with what to install, if an optional package is absent; imports nothing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"the package {package} is not installed: run pip install 'sharmill[{package}]'")


def _resemblyzer_version() -> str:
    try:
        return importlib.metadata.version("resemblyzer")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("the package resemblyzer is not installed: run pip install resemblyzer") from None


def check_nemo_archive(path: Path) -> None:
    """Raises ConfigError unless the file is a tar archive with the configuration and weights of a NeMo model."""
    try:
        with tarfile.open(path) as archive:
            missing = set(_NEMO_MEMBERS)
            for member in archive:
                missing.discard(Path(member.name).name)
                if not missing:
                    return
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ConfigError(f"{path} is not a NeMo checkpoint, which is a tar archive: {first_line(error)}") from error
    raise ConfigError(f"{path} is not a NeMo checkpoint: the archive lacks {' and '.join(sorted(missing))}")


def check_transformers_config(path: Path) -> None:
    """Raises ConfigError unless a directory's config.json names a codec that is supported."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / 'config.json'} cannot be read: {first_line(error)}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type not in TRANSFORMERS_CODECS:
        raise ConfigError(
            f"{path} holds a model of type {model_type!r}: supported are {', '.join(TRANSFORMERS_CODECS)}"
        )


def file_checksum(path: Path) -> str:
    """xxh3 (16 hex digits) of a file's bytes."""
    return _checksum([path], path.parent, with_names=False)


def directory_checksum(path: Path) -> str:
    """xxh3 (16 hex digits) of the names, sizes and bytes of a directory's files, hidden ones left out.

    Download tools keep their own notes, with times in them, in hidden folders beside the model.
    """
    files = [file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path))]
    return _checksum(sorted(files, key=lambda file: file.relative_to(path).as_posix()), path, with_names=True)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _checksum(files: Iterable[Path], root: Path, *, with_names: bool) -> str:
    digest = xxhash.xxh3_64()
    for file in files:
        if with_names:
            digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def first_line(error: BaseException, limit: int = 200) -> str:
    """The first line of an error's message, for a message of one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:limit]
