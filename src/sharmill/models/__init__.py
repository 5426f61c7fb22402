"""Speaker encoders and codecs behind two protocols, loaded by name.

Importing this package, and describing a model, imports neither torch nor NeMo nor transformers; that happens when a
model is loaded, inside its backend.

>>> describe_codec("builtin")["backend"]
'builtin'
"""

from __future__ import annotations

from sharmill.models.describe import describe_codec, describe_speaker_encoder
from sharmill.models.names import parse_codec_name, parse_speaker_encoder_name
from sharmill.models.protocols import Codec, SpeakerEncoder

__all__ = [
    "Codec",
    "SpeakerEncoder",
    "describe_codec",
    "describe_speaker_encoder",
    "load_codec",
    "load_speaker_encoder",
]


def load_speaker_encoder(name: str, device: str = "cpu") -> SpeakerEncoder:
    """Loads a speaker encoder.

    Args:
        name: ``resemblyzer``, ``nemo:titanet_large`` (any pretrained name) or ``nemo:/path/model.nemo``.
        device: torch device to run it on.

    Raises:
        ConfigError: if the name, the file or the installation is wrong; one line that says what to do.
    """
    model = parse_speaker_encoder_name(name)
    if model.backend == "resemblyzer":
        from sharmill.models.resemblyzer_encoder import ResemblyzerEncoder

        return ResemblyzerEncoder(device)
    from sharmill.models.nemo_speaker import load_nemo_speaker_encoder

    return load_nemo_speaker_encoder(model, device)


def load_codec(name: str, device: str = "cpu") -> Codec:
    """Loads a codec.

    Args:
        name: ``builtin``, ``nemo:<pretrained name or .nemo file>`` or ``transformers:<directory or hub name>``.
        device: torch device to run it on.

    Raises:
        ConfigError: if the name, the file or the installation is wrong; one line that says what to do.
    """
    model = parse_codec_name(name)
    if model.backend == "builtin":
        from sharmill.models.untrained_codec import load_untrained_codec

        return load_untrained_codec(device)
    if model.backend == "nemo":
        from sharmill.models.nemo_codec import load_nemo_codec

        return load_nemo_codec(model, device)
    from sharmill.models.transformers_codec import load_transformers_codec

    return load_transformers_codec(model, device)
