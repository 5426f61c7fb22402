"""The codec that comes with sharmill, implemented in plain torch.

It is a NeMo AudioCodecModel. Importing NeMo opens about ten thousand files, which every rank would do when it starts.
The encoder and the quantizer are therefore implemented here with NeMo's arithmetic, and NeMo is loaded only for
decoding.
"""

import io
import math
import tarfile
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

from sharmill.models import ModelFamily
from sharmill.models.codec_backend import CodecBackend, CodecSpec
from sharmill.models.nemo_models import ENCODING_PARTS
from sharmill.models.tensors import find_reach, weights_checksum

# NeMo's margin, which keeps values off the boundary between two levels.
_LEVEL_MARGIN: Final = 1e-3


class _CausalConv(nn.Module):
    """A convolution whose output depends only on present and past input."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(inputs, outputs, kernel_size, stride))
        self._padding = kernel_size - stride

    def forward(self, values: Tensor) -> Tensor:
        return self.conv(functional.pad(values, (self._padding, 0)))


def _make_encoder(config: dict[str, Any], weights: dict[str, Tensor]) -> nn.Sequential:
    """Return NeMo's CausalHiFiGANEncoder without residual blocks: (batch, 1, samples) -> (batch, values, frames).

    Since it is causal, the padding after an item does not affect the item's own frames.

    Args:
        config: the arguments of the encoder.
        weights: the tensors by NeMo's names.
    """
    rates: list[int] = config["down_sample_rates"]
    channels = [config["base_channels"] << octave for octave in range(len(rates) + 1)]
    convs = {"pre_conv": _CausalConv(1, channels[0], config["in_kernel_size"])}
    for number, (rate, (inputs, outputs)) in enumerate(zip(rates, pairwise(channels), strict=True)):
        convs[f"down_sample_conv_layers.{number}"] = _CausalConv(inputs, outputs, 2 * rate, stride=rate)
    convs["post_conv"] = _CausalConv(channels[-1], config["encoded_dim"], config["out_kernel_size"])
    for name, conv in convs.items():
        prefix = f"audio_encoder.{name}."
        own = {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}
        conv.load_state_dict(own)
    first, *others = convs.values()
    return nn.Sequential(first, *(nn.Sequential(nn.LeakyReLU(), conv) for conv in others))


def _quantize(values: Tensor, levels: Tensor) -> Tensor:
    """Return the indices (batch, frames) of values (batch, dimensions, frames) in one codebook.

    The method is finite scalar quantization (Mentzer et al., https://arxiv.org/abs/2309.15505).

    Args:
        values: the encoded values.
        levels: (1, dimensions, 1) int32, the number of levels in each dimension.
    """
    scale = (levels - 1) / 2 * (1 - _LEVEL_MARGIN)
    offset = torch.where(levels % 2 == 0, 0.5, 0)
    rounded = torch.round(scale * (values + (offset / scale).tan()).tanh() - offset)
    half = levels // 2
    bases = levels.cumprod(1, dtype=torch.int32) // levels
    # NeMo also divides and multiplies by half, because its codes are fractions. Doing the same gives the same rounding.
    return torch.sum((half * (rounded / half) + half) * bases, dim=1).to(torch.int32)


class _BuiltinCodec(CodecBackend):
    """Encoder and quantizer of a NeMo AudioCodecModel, made from its configuration and weights.

    ``decoding`` is the same model in NeMo's implementation, which is loaded when codes are first decoded.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], device: str, decoding: ModelFamily) -> None:
        self._decoding = decoding
        quantizer = config["vector_quantizer"]
        # The initial weights are random, but drawing them must not change the caller's random state.
        with torch.random.fork_rng(devices=[]):
            encoder = _make_encoder(config["audio_encoder"], weights)
        self._encoder = encoder.eval().requires_grad_(False).to(device)
        self._levels = torch.tensor(quantizer["num_levels_per_group"], dtype=torch.int32, device=device)[None, :, None]
        spec = CodecSpec(
            name="builtin",
            sampling_rate=config["sample_rate"],
            samples_per_frame=config["samples_per_frame"],
            num_codebooks=quantizer["num_groups"],
            codebook_size=math.prod(quantizer["num_levels_per_group"]),
            checksum=weights_checksum(weights),
            decoded_sampling_rate=config["sample_rate"],
        )
        super().__init__(spec, device)

    def encode_frames(self, audio: Tensor, num_frames: Tensor) -> Tensor:
        groups = self._encoder(audio[:, None]).chunk(self.num_codebooks, dim=1)
        return torch.stack([_quantize(group, self._levels) for group in groups], dim=1)

    def find_reach(self) -> tuple[int, int] | None:
        return find_reach(lambda audio: self._encoder(audio[:, None].to(self.device)).cpu(), self.samples_per_frame)

    def decode_frames(self, codes: Tensor) -> Tensor:
        return self._with_decoder.decode_frames(codes)

    @cached_property
    def _with_decoder(self) -> CodecBackend:
        return self._decoding.load(str(self.device))


def load_builtin_codec(path: Path, device: str, decoding: ModelFamily) -> CodecBackend:
    """Load the codec from its file.

    ``decoding`` is the same model in NeMo's implementation. It is loaded only for decoding, so that encoding does not
    need NeMo.
    """
    with tarfile.open(path) as archive:
        members = {member.name.removeprefix("./"): archive.extractfile(member) for member in archive}
        files = {name: stream.read() for name, stream in members.items() if stream is not None}
    config = yaml.safe_load(files["model_config.yaml"])
    stored = torch.load(io.BytesIO(files["model_weights.ckpt"]), map_location="cpu", weights_only=True)
    weights = {name: tensor for name, tensor in stored.items() if name.startswith(ENCODING_PARTS)}
    # The file stores the weights in half precision.
    weights |= {name: tensor.float() for name, tensor in weights.items() if tensor.is_floating_point()}
    return _BuiltinCodec(config, weights, device, decoding)
