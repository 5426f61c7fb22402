"""The codecs of Hugging Face transformers: EnCodec, DAC and Mimi.

EnCodec runs at its highest bandwidth, DAC and Mimi with all their quantizers. All three use residual quantization, so
the first rows of the codes equal the codes with fewer codebooks.

Audio is padded with zeros to whole frames. EnCodec itself would mirror the end of the audio instead. The difference
affects the last one or two frames of audio whose length is not a whole number of frames.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharmill.errors import ConfigError
from sharmill.models.checkpoints import TRANSFORMERS_TYPES
from sharmill.models.codec_backend import CodecBackend, CodecSpec
from sharmill.models.hub import require_reachable
from sharmill.models.tensors import find_reach, limited_layers, loading, require_whole, weights_checksum


class _TransformersCodec(CodecBackend):
    """A codec based on a model of transformers; ``options`` are passed to the model's ``encode``."""

    def __init__(self, model: Any, spec: CodecSpec, device: str, options: dict[str, Any]) -> None:
        self._model = model.to(device)
        self._options = options
        super().__init__(spec, device)

    def find_reach(self) -> tuple[int, int] | None:
        if self._model.config.model_type != "dac":
            # EnCodec's recurrent layers and Mimi's attention depend on all preceding audio.
            return None
        return find_reach(
            lambda audio: self._model.encoder(audio[:, None, :].to(self.device)).cpu(), self.samples_per_frame
        )

    def encode_frames(self, audio: Tensor, num_frames: Tensor) -> Tensor:
        codes = self._model.encode(audio[:, None, :], **self._options).audio_codes
        # EnCodec returns chunks; a supported model has exactly one.
        return codes[0] if codes.ndim == 4 else codes

    def decode_frames(self, codes: Tensor) -> Tensor:
        is_encodec = self._model.config.model_type == "encodec"
        decoded = self._model.decode(codes[None], [None]) if is_encodec else self._model.decode(audio_codes=codes)
        return decoded.audio_values.reshape(1, -1)


def _describe(model: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return facts about a model for a ``CodecSpec``, and the options of its ``encode``.

    EnCodec models must have one channel and no chunks, like the 24 kHz model and the 32 kHz model of MusicGen.
    """
    config = model.config
    if config.model_type == "dac":
        # DAC's convolutions look in both directions, so only items with equal numbers of frames share a batch.
        frame = math.prod(config.downsampling_ratios)
        return {"samples_per_frame": frame, "num_codebooks": config.n_codebooks, "equal_lengths_only": True}, {}
    if config.model_type == "mimi":
        facts = {
            "samples_per_frame": round(config.sampling_rate / config.frame_rate),
            "num_codebooks": config.num_quantizers,
            # Mimi's attention is causal. If its convolutions are too, padding on the right has no effect.
            "equal_lengths_only": not config.use_causal_conv,
        }
        return facts, {"num_quantizers": config.num_quantizers}
    if config.chunk_length_s is not None:
        raise ConfigError(
            f"{name} works on overlapping chunks of {config.chunk_length_s} s, so the number of frames is not "
            "ceil(num_samples / samples_per_frame): use a model without chunks, such as facebook/encodec_24khz",
            code="bad_model",
        )
    bandwidth, quantizer = max(config.target_bandwidths), model.quantizer
    facts = {
        "samples_per_frame": math.prod(config.upsampling_ratios),
        "num_codebooks": min(len(quantizer.layers), quantizer.get_num_quantizers_for_bandwidth(bandwidth)),
        "equal_lengths_only": bool(
            not config.use_causal_conv or config.norm_type == "time_group_norm" or config.normalize
        ),
        "min_frames_in_batch": _encodec_min_frames(config),
    }
    return facts, {"bandwidth": bandwidth}


def load_transformers_codec(name: str, source: Path | str, device: str) -> CodecBackend:
    """Load EnCodec, DAC or Mimi from a directory or from the hub.

    A model in the local cache is loaded without contacting the hub.

    Args:
        name: the model as named in the configuration, for messages.
        source: a directory, or a name on the hub.
        device: the torch device of the model.

    Raises:
        ConfigError: the model is not one of the three, is incomplete, or does not return one frame for every
            ``samples_per_frame`` samples.
    """
    from safetensors import SafetensorError

    with (
        loading(name, OSError, RuntimeError, ValueError, KeyError, SafetensorError),
        _quiet_transformers(),
        torch.random.fork_rng(devices=[]),
    ):
        model = _from_directory_or_hub(name, source)
    # Half-precision weights become float32, so that codes differ less between machines.
    model = model.float().eval().requires_grad_(False)
    # The configuration of DAC has no such key, because DAC always has one channel.
    if (channels := getattr(model.config, "audio_channels", 1)) != 1:
        raise ConfigError(
            f"{name} encodes {channels} channels, but all audio here is mono: use another codec", code="bad_model"
        )
    facts, options = _describe(model, name)
    spec = CodecSpec(
        name=name,
        sampling_rate=int(model.config.sampling_rate),
        codebook_size=int(model.config.codebook_size),
        checksum=weights_checksum(model.state_dict()),
        decoded_sampling_rate=int(model.config.sampling_rate),
        **facts,
    )
    return _TransformersCodec(model, spec, device, options)


def _from_directory_or_hub(name: str, source: Path | str) -> Any:
    if not isinstance(source, str):
        with limited_layers(name, source):
            return _from_pretrained(str(source), name, local_files_only=True)
    try:
        return _from_pretrained(source, name, local_files_only=True)
    except OSError:
        from huggingface_hub import constants

        require_reachable(constants.ENDPOINT, name)
    return _from_pretrained(source, name, local_files_only=False)


def _from_pretrained(source: str, name: str, *, local_files_only: bool) -> Any:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(source, local_files_only=local_files_only)
    if config.model_type not in TRANSFORMERS_TYPES:
        raise ConfigError(
            f"{name} is a model of type {config.model_type!r}; supported types: {', '.join(TRANSFORMERS_TYPES)}",
            code="bad_model",
        )
    model, report = AutoModel.from_pretrained(
        source, config=config, output_loading_info=True, local_files_only=local_files_only
    )
    require_whole(name, report["missing_keys"])
    return model


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _encodec_min_frames(config: Any) -> int:
    """Return the minimum number of frames for which a causal EnCodec ignores the padding on the right.

    EnCodec pads on the left with a mirror image of the first samples, which makes it look ahead by the length of this
    padding. If an item is shorter than that, its right padding becomes visible to the model.
    """
    if config.pad_mode != "reflect":
        return 0
    dilation = config.dilation_growth_rate ** (config.num_residual_layers - 1)
    deepest_ratio = config.upsampling_ratios[0]
    residual = ((config.residual_kernel_size - 1) * dilation + 1) / deepest_ratio
    strided = (deepest_ratio + 1) / deepest_ratio
    return max(config.last_kernel_size, math.ceil(residual), math.ceil(strided))
