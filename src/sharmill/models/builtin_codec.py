"""The codec that ships with the project, in plain torch.

It is a NeMo AudioCodecModel. Importing NeMo opens some ten thousand files, which every rank would do at its start: so
the encoder and the quantizer are written here, with NeMo's names for the weights and its arithmetic, and NeMo is loaded
only to turn codes into audio.
"""

from __future__ import annotations

import io
import math
import tarfile
from functools import cached_property
from typing import Any, Final

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

from sharmill.models.builtin import BUILTIN_FILE
from sharmill.models.codec_backend import CodecBackend, CodecSpec
from sharmill.models.nemo import NemoCodec
from sharmill.models.tensors import find_reach, weights_checksum

# NeMo's, against values between two levels.
_LEVEL_MARGIN: Final = 1e-3


class _CausalConv(nn.Module):
    """Convolution that sees nothing of what comes later; zero beyond each item's end."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, *, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        layer = nn.Conv1d(inputs, outputs, kernel_size, stride, dilation=dilation)
        self.conv = nn.utils.parametrizations.weight_norm(layer)
        self._padding = (kernel_size - 1) * dilation + 1 - stride

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        values = self.conv(functional.pad(values, (self._padding, 0)))
        return values * (torch.arange(values.shape[2], device=values.device) < lengths[:, None, None])


class _Residual(nn.Module):
    def __init__(self, channels: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        self.input_conv = _CausalConv(channels, channels, kernel_size, dilation=dilation)
        self.skip_conv = _CausalConv(channels, channels, kernel_size)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        added = self.input_conv(functional.leaky_relu(values), lengths)
        return values + self.skip_conv(functional.leaky_relu(added), lengths)


class _Blocks(nn.Module):
    def __init__(self, blocks: list[Any]) -> None:
        super().__init__()
        self.res_blocks = nn.ModuleList(blocks)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        for block in self.res_blocks:
            values = block(values, lengths)
        return values


class _CausalEncoder(nn.Module):
    """NeMo's CausalHiFiGANEncoder with residual blocks of one kernel size; ``config`` has its arguments."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        (kernel_size,) = config["resblock_kernel_sizes"]
        self._rates: list[int] = config["down_sample_rates"]
        channels: int = config["base_channels"]
        self.pre_conv = _CausalConv(1, channels, config["in_kernel_size"])
        self.down_sample_conv_layers = nn.ModuleList()
        self.res_layers = nn.ModuleList()
        for rate in self._rates:
            residuals = [_Residual(channels, kernel_size, dilation) for dilation in config["resblock_dilation_sizes"]]
            # NeMo has one level for the kernel sizes and one for the dilations.
            self.res_layers.append(_Blocks([_Blocks(residuals)]))
            self.down_sample_conv_layers.append(_CausalConv(channels, 2 * channels, 2 * rate, stride=rate))
            channels *= 2
        self.post_conv = _CausalConv(channels, config["encoded_dim"], config["out_kernel_size"])

    def forward(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Encode whole frames (batch, samples) to (batch, encoded_dim, frames)."""
        lengths = num_samples
        values = self.pre_conv(audio[:, None], lengths)
        for rate, residuals, shorten in zip(self._rates, self.res_layers, self.down_sample_conv_layers, strict=True):
            values = functional.leaky_relu(residuals(values, lengths))
            lengths = lengths // rate
            values = shorten(values, lengths)
        encoded: Tensor = self.post_conv(functional.leaky_relu(values), lengths)
        return encoded


class _Quantizer(nn.Module):
    """One codebook by finite scalar quantization (Mentzer et al., https://arxiv.org/abs/2309.15505)."""

    def __init__(self, levels: list[int]) -> None:
        super().__init__()
        bases = torch.tensor([1, *levels[:-1]]).cumprod(0, dtype=torch.int32)
        self.register_buffer("dim_base_index", bases[None, :, None])
        self.register_buffer("num_levels", torch.tensor(levels, dtype=torch.int32)[None, :, None])

    def forward(self, values: Tensor) -> Tensor:
        """Return the indices (batch, frames) of values (batch, dimensions, frames)."""
        levels: Any = self.num_levels
        scale = (levels - 1) / 2 * (1 - _LEVEL_MARGIN)
        offset = torch.where(levels % 2 == 0, 0.5, 0)
        rounded = torch.round(scale * (values + (offset / scale).tan()).tanh() - offset)
        half = levels // 2
        # There and back again, as in NeMo, whose codes are the fractions.
        return torch.sum((half * (rounded / half) + half) * self.dim_base_index, dim=1).to(torch.int32)


class _GroupQuantizer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.fsqs = nn.ModuleList(_Quantizer(config["num_levels_per_group"]) for _ in range(config["num_groups"]))

    def forward(self, values: Tensor) -> Tensor:
        """Return the indices (batch, codebooks, frames) of values (batch, dimensions, frames)."""
        parts = values.chunk(len(self.fsqs), dim=1)
        return torch.stack([quantize(part) for quantize, part in zip(self.fsqs, parts, strict=True)], dim=1)


class _Network(nn.Module):
    """The layers of a codec, by NeMo's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.audio_encoder = _CausalEncoder(config["audio_encoder"])
        self.vector_quantizer = _GroupQuantizer(config["vector_quantizer"])


class _BuiltinCodec(CodecBackend):
    """The encoder and the quantizer of a network; ``config`` is that of a NeMo AudioCodecModel."""

    def __init__(self, config: dict[str, Any], network: _Network, device: str) -> None:
        self._network = network.eval().requires_grad_(False).to(device)
        spec = CodecSpec(
            name="builtin",
            sampling_rate=config["sample_rate"],
            samples_per_frame=config["samples_per_frame"],
            num_codebooks=config["vector_quantizer"]["num_groups"],
            codebook_size=math.prod(config["vector_quantizer"]["num_levels_per_group"]),
            checksum=weights_checksum(network.state_dict()),
            decoded_sampling_rate=config["sample_rate"],
        )
        super().__init__(spec, device)

    def encode_frames(self, audio: Tensor, num_frames: Tensor) -> Tensor:
        encoded = self._network.audio_encoder(audio, num_frames * self.samples_per_frame)
        codes: Tensor = self._network.vector_quantizer(encoded)
        return codes

    def find_reach(self) -> tuple[int, int] | None:
        return find_reach(self._encoded, self.samples_per_frame)

    @torch.no_grad()
    def _encoded(self, audio: Tensor) -> Tensor:
        num_samples = torch.tensor([audio.shape[1]], device=self.device)
        encoded: Tensor = self._network.audio_encoder(audio.to(self.device), num_samples)
        return encoded.float().cpu()

    def decode_frames(self, codes: Tensor) -> Tensor:
        return self._with_decoder.decode_frames(codes)

    @cached_property
    def _with_decoder(self) -> CodecBackend:
        return NemoCodec(name=self.spec.name, target=str(BUILTIN_FILE)).load(str(self.device))


def load_builtin_codec(device: str) -> CodecBackend:
    """Load the codec; NeMo is needed only to decode."""
    with tarfile.open(BUILTIN_FILE) as archive:
        members = {member.name.removeprefix("./"): archive.extractfile(member) for member in archive}
        files = {name: stream.read() for name, stream in members.items() if stream is not None}
    config = yaml.safe_load(files["model_config.yaml"])
    weights = torch.load(io.BytesIO(files["model_weights.ckpt"]), map_location="cpu", weights_only=True)
    # The first weights are drawn.
    with torch.random.fork_rng(devices=[]):
        network = _Network(config)
    network.load_state_dict({name: weights[name] for name in network.state_dict()})
    return _BuiltinCodec(config, network, device)
