"""Speaker encoders and codecs behind two protocols, found and loaded by name.

Importing this package, and finding a model, imports neither torch nor NeMo nor transformers; that happens when a model
is loaded or checked.

>>> find_codec("builtin").identity()["backend"]
'builtin'

A family of models is a class derived from ``ModelFamily``: sharmill's own are in ``sharmill.registry``; another package
adds one by an entry point in the group ``sharmill.encoders`` or ``sharmill.codecs``, or a configuration names it as
``python:package.module:Class``.
"""

from __future__ import annotations

from typing import Any

from sharmill.config import Precision
from sharmill.errors import ConfigError
from sharmill.models.arithmetic import make_deterministic, with_precision
from sharmill.models.family import ModelFamily, find_model
from sharmill.models.protocols import Codec, DecodingCodec, SpeakerEncoder
from sharmill.registry import CODECS, ENCODERS, Registry

__all__ = [
    "Codec",
    "DecodingCodec",
    "ModelFamily",
    "SpeakerEncoder",
    "find_codec",
    "find_speaker_encoder",
    "load_codec",
    "load_speaker_encoder",
    "make_deterministic",
]


def find_speaker_encoder(name: str, **options: Any) -> ModelFamily:
    """Return a speaker encoder, not loaded, by its name and options of its family.

    Raises:
        ConfigError: there is no such family, or it has no such option.

    >>> find_speaker_encoder("nemo:titanet_large").min_similarity
    0.6
    """
    return find_model(ENCODERS, name, options)


def find_codec(name: str, **options: Any) -> ModelFamily:
    """Return a codec, not loaded, by its name and options of its family.

    Raises:
        ConfigError: there is no such family, or it has no such option.

    >>> find_codec("nemo:nvidia/low-frame-rate-speech-codec-22khz").published_name
    'nemo:nvidia/low-frame-rate-speech-codec-22khz'
    """
    return find_model(CODECS, name, options)


def load_speaker_encoder(
    name: str, device: str = "cpu", *, precision: Precision = "fp32", **options: Any
) -> SpeakerEncoder:
    """Load a speaker encoder.

    Args:
        name: ``resemblyzer``, ``nemo:titanet_large`` (any pretrained name), ``nemo:/path/model.nemo``, or one of
            another package.
        device: torch device to run it on.
        precision: arithmetic of its function.
        options: those of its family, such as ``allow_targets`` of NeMo's.

    Raises:
        ConfigError: if the name, the file or the installation is wrong, or the device does not have the precision; one
            line that says what to do.

    >>> load_speaker_encoder("resemblyzer").embedding_size
    256
    """
    encoder: SpeakerEncoder = find_speaker_encoder(name, **options).load(device)
    _check_model(ENCODERS, name, encoder, SpeakerEncoder, "embed")
    if precision != "fp32":
        encoder.embed = with_precision(encoder.embed, device, precision)  # type: ignore[method-assign]
    return encoder


def load_codec(name: str, device: str = "cpu", *, precision: Precision = "fp32", **options: Any) -> Codec:
    """Load a codec.

    Args:
        name: ``builtin``, ``nemo:<pretrained name or .nemo file>``, ``transformers:<directory or hub name>``,
            or one of another package.
        device: torch device to run it on.
        precision: arithmetic of its function.
        options: those of its family, such as ``allow_targets`` of NeMo's.

    Raises:
        ConfigError: if the name, the file or the installation is wrong, or the device does not have the precision; one
            line that says what to do.

    >>> load_codec("builtin").samples_per_frame
    640
    """
    codec: Codec = find_codec(name, **options).load(device)
    _check_model(CODECS, name, codec, Codec, "encode")
    if precision != "fp32":
        codec.encode = with_precision(codec.encode, device, precision)  # type: ignore[method-assign]
    from sharmill.models.codec_backend import check_codec

    check_codec(codec, name)
    return codec


def _check_model(registry: Registry, name: str, model: Any, protocol: type, method: str) -> None:
    """Raise ConfigError where a model lacks something that its protocol asks for."""
    if missing := [part for part in (*protocol.__annotations__, method) if not hasattr(model, part)]:
        raise ConfigError(f"the {registry.kind} {name!r} has no {' and no '.join(missing)}", code="bad_plugin")
