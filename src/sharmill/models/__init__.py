"""Speaker encoders and codecs behind two protocols, loaded by name.

Importing this package, and describing a model, imports neither torch nor NeMo nor transformers; that happens when a
model is loaded.

>>> describe_codec("builtin")["backend"]
'builtin'

Another package adds a model by an entry point in the group ``sharmill.encoders`` or ``sharmill.codecs``, or a
configuration names it as ``python:package.module:Class``. The class is called with ``(target, device)``: what follows
its name and a colon in the configuration ("" if nothing does), and a torch device; what it returns must have what
``SpeakerEncoder`` or ``Codec`` ask for. A static method ``describe(target)`` may return a dictionary of texts that
identifies the model before it is loaded, and raise ConfigError for a target that cannot be loaded. A static method
``require(target)`` may raise ConfigError, before a run begins, for a model that cannot be fetched. A speaker encoder's
attribute ``min_similarity`` is the threshold that ``match.min_similarity: null`` stands for. An attribute ``modules``
names modules that are imported when it is loaded: the ranks of one machine import them once.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sharmill.config import Precision
from sharmill.errors import ConfigError
from sharmill.models.arithmetic import make_deterministic, with_precision
from sharmill.models.families import directory_checksum, file_checksum
from sharmill.models.protocols import Codec, DecodingCodec, SpeakerEncoder
from sharmill.registry import CODECS, ENCODERS, Registry

__all__ = [
    "Codec",
    "DecodingCodec",
    "SpeakerEncoder",
    "codec_modules",
    "describe_codec",
    "describe_speaker_encoder",
    "encoder_modules",
    "load_codec",
    "load_speaker_encoder",
    "make_deterministic",
    "own_min_similarity",
    "published_name",
    "require_codec",
    "require_speaker_encoder",
    "similarities_of_strangers",
]


def load_speaker_encoder(
    name: str, device: str = "cpu", allow_targets: Sequence[str] = (), precision: Precision = "fp32"
) -> SpeakerEncoder:
    """Load a speaker encoder.

    Args:
        name: ``resemblyzer``, ``nemo:titanet_large`` (any pretrained name), ``nemo:/path/model.nemo``, or one of
            another package.
        device: torch device to run it on.
        allow_targets: what the configuration in a .nemo file may name beside the known classes.
        precision: arithmetic of its function.

    Raises:
        ConfigError: if the name, the file or the installation is wrong, or the device does not have the precision; one
            line that says what to do.

    >>> load_speaker_encoder("resemblyzer").embedding_size
    256
    """
    encoder = _implementation(ENCODERS, name)(ENCODERS.split(name)[1], device, **_trust(ENCODERS, name, allow_targets))
    _check_model(ENCODERS, name, encoder, SpeakerEncoder, "embed")
    if precision != "fp32":
        encoder.embed = with_precision(encoder.embed, device, precision)
    return encoder


def load_codec(
    name: str, device: str = "cpu", allow_targets: Sequence[str] = (), precision: Precision = "fp32"
) -> Codec:
    """Load a codec.

    Args:
        name: ``builtin``, ``nemo:<pretrained name or .nemo file>``, ``transformers:<directory or hub name>``,
            or one of another package.
        device: torch device to run it on.
        allow_targets: what the configuration in a .nemo file may name beside the known classes.
        precision: arithmetic of its function.

    Raises:
        ConfigError: if the name, the file or the installation is wrong, or the device does not have the precision; one
            line that says what to do.

    >>> load_codec("builtin").samples_per_frame
    640
    """
    codec = _implementation(CODECS, name)(CODECS.split(name)[1], device, **_trust(CODECS, name, allow_targets))
    _check_model(CODECS, name, codec, Codec, "encode")
    if precision != "fp32":
        codec.encode = with_precision(codec.encode, device, precision)
    from sharmill.models.codec_backend import check_codec

    check_codec(codec, name)
    return codec


def describe_speaker_encoder(name: str, allow_targets: Sequence[str] = ()) -> dict[str, str]:
    """Return what identifies a speaker encoder, without loading it.

    Returns:
        ``backend`` and ``name``; for a local file also ``checksum`` (xxh3 of its bytes), for resemblyzer the
        ``version`` of the package, which brings the weights.

    Raises:
        ConfigError: if the name cannot be loaded for a reason that can be seen now; its message says what to do.
    """
    return _describe(ENCODERS, name, allow_targets)


def own_min_similarity(name: str) -> float | None:
    """Return the least similarity of two utterances that a speaker encoder takes for one voice; None if it has none.

    It is the attribute ``min_similarity`` of what the registry has under the encoder's name: a number, or a function
    of the target. Similarities of two encoders cannot be compared, so that each needs a number of its own.

    >>> own_min_similarity("nemo:titanet_large")
    0.6
    """
    implementation = _implementation(ENCODERS, name)
    own = getattr(implementation, "min_similarity", None)
    value = own(ENCODERS.split(name)[1]) if callable(own) else own
    if value is not None and not isinstance(value, (int, float)):
        raise ConfigError(
            f"min_similarity of the encoder {name!r} is {value!r}: it must be a number or a function of the target",
            code="bad_plugin",
        )
    return value


def similarities_of_strangers(name: str) -> tuple[tuple[float, float], ...]:
    """Return the attribute ``strangers`` of a speaker encoder, as of ``families.Family``; empty where it has none."""
    return getattr(_implementation(ENCODERS, name), "strangers", ())


def encoder_modules(name: str) -> Sequence[str]:
    """Return the names of modules that are imported when a speaker encoder is loaded, as far as they are known."""
    return getattr(_implementation(ENCODERS, name), "modules", ())


def codec_modules(name: str) -> Sequence[str]:
    """Return the names of modules that are imported when a codec is loaded, as far as they are known."""
    return getattr(_implementation(CODECS, name), "modules", ())


def describe_codec(name: str, allow_targets: Sequence[str] = ()) -> dict[str, str]:
    """Return what identifies a codec, without loading it.

    Returns:
        ``backend`` and ``name``; for a local file or directory, and for the codecs that sharmill brings, also
        ``checksum`` (xxh3 of the bytes; of a directory's files in sorted order).

    Raises:
        ConfigError: if the name cannot be loaded for a reason that can be seen now; its message says what to do.
    """
    return _describe(CODECS, name, allow_targets)


def published_name(name: str) -> str:
    """Return a codec's name without the folders of this machine, for what is published.

    >>> published_name("nemo:nvidia/low-frame-rate-speech-codec-22khz")
    'nemo:nvidia/low-frame-rate-speech-codec-22khz'
    """
    implementation, target = CODECS.split(name)
    path = Path(target).expanduser()
    return f"{implementation}:{path.name}" if target and path.exists() else name


def require_speaker_encoder(name: str) -> None:
    """Raise ConfigError unless a speaker encoder is on this machine or can be fetched; NeMo may be imported for it."""
    _require(ENCODERS, name)


def require_codec(name: str) -> None:
    """Raise ConfigError unless a codec is on this machine or can be fetched; NeMo may be imported for it."""
    _require(CODECS, name)


def _require(registry: Registry, name: str) -> None:
    implementation, target = registry.split(name)
    if (require := getattr(registry.load(implementation), "require", None)) is not None:
        require(target)


def _implementation(registry: Registry, name: str) -> Callable[[str, str], Any]:
    implementation = registry.split(name)[0]
    make = registry.load(implementation)
    try:
        inspect.signature(make).bind("target", "device")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the {registry.kind} {implementation!r} cannot be called with (target, device): {error}", code="bad_plugin"
        ) from error
    return make


def _trust(registry: Registry, name: str, allow_targets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    if allow_targets and registry.split(name)[0] != "nemo":
        raise ConfigError(f"allow_targets is for NeMo checkpoints, and {name!r} is none", code="bad_config_value")
    return {"allow_targets": tuple(allow_targets)} if allow_targets else {}


def _describe(registry: Registry, name: str, allow_targets: Sequence[str]) -> dict[str, str]:
    implementation, target = registry.split(name)
    make = _implementation(registry, name)
    described = {"backend": implementation, "name": name}
    if (describe := getattr(make, "describe", None)) is not None:
        return described | describe(target, **_trust(registry, name, allow_targets))
    entry = registry.find(implementation)
    if entry.dist is not None:
        described["version"] = f"{entry.dist.name} {entry.dist.version}"
    elif (spec := importlib.util.find_spec(entry.module)) is not None and spec.origin is not None:
        described["version"] = file_checksum(Path(spec.origin))
    if target and (path := Path(target).expanduser()).exists():
        described["checksum"] = directory_checksum(path) if path.is_dir() else file_checksum(path)
    return described


def _check_model(registry: Registry, name: str, model: Any, protocol: type, method: str) -> None:
    """Raise ConfigError where a model lacks something that its protocol asks for."""
    if missing := [part for part in (*protocol.__annotations__, method) if not hasattr(model, part)]:
        raise ConfigError(f"the {registry.kind} {name!r} has no {' and no '.join(missing)}", code="bad_plugin")
