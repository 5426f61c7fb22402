"""Fast CPU versions of the layers in NeMo's codecs and speaker encoders.

If the channels of a frame are contiguous in memory, rather than the frames of a channel, oneDNN computes convolutions
up to nine times as fast, and depthwise convolutions more than ten times as fast. Results differ only by the rounding of
sums. A model with a layer that this module does not know keeps NeMo's implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

if TYPE_CHECKING:
    from nemo.collections.asr.models import EncDecSpeakerLabelModel
    from nemo.collections.asr.modules import ConvASREncoder
    from nemo.collections.asr.parts.submodules.jasper import JasperBlock
    from nemo.collections.asr.parts.submodules.tdnn_attention import AttentivePoolLayer
    from nemo.collections.tts.modules.audio_codec_modules import CodecActivation, HiFiGANResLayer


class _UnknownLayer(Exception):
    """A model has a layer that this module does not know, and keeps NeMo's implementation."""


def _channels_last(values: Tensor) -> Tensor:
    """Return values (batch, channels, time) as (batch, channels, 1, time) with channels contiguous in memory."""
    # With one channel, both layouts are valid. The transpositions give the tensor the strides of the wanted layout.
    return values.transpose(1, 2).contiguous().transpose(1, 2)[:, :, None]


@dataclass(frozen=True)
class _Conv:
    """A zero-padded convolution over time, with a weight (outputs, inputs // groups, 1, kernel size)."""

    weight: Tensor
    bias: Tensor | None
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1

    @classmethod
    def from_layer(cls, conv: nn.Conv1d, norm: nn.BatchNorm1d | None = None) -> _Conv:
        """Convert a layer, and fold in the normalization after it, if any.

        Raises:
            _UnknownLayer: the layer does not pad with zeros, or the normalization uses the statistics of each batch.
        """
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise _UnknownLayer
        weight, bias = conv.weight, conv.bias
        if norm is not None:
            if norm.running_mean is None or norm.running_var is None:
                raise _UnknownLayer
            weight, bias = fuse_conv_bn_weights(
                weight, bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
            )
        (stride,), (padding,), (dilation,) = conv.stride, conv.padding, conv.dilation
        bias = None if bias is None else bias.detach()
        return cls(_channels_last(weight.detach()), bias, stride, padding, dilation, conv.groups)

    @property
    def kernel_size(self) -> int:
        return self.weight.shape[3]

    def __call__(self, values: Tensor) -> Tensor:
        """Map (batch, inputs, 1, time) to (batch, outputs, 1, time), both with contiguous channels."""
        # torch computes pointwise convolutions of small batches with a slower library unless they are dilated. Dilation
        # makes no difference with a kernel size of 1.
        dilation = 2 if self.kernel_size == 1 else self.dilation
        return functional.conv2d(
            values, self.weight, self.bias, (1, self.stride), (0, self.padding), (1, dilation), self.groups
        )


@dataclass(frozen=True)
class _Validity:
    """The valid frames of a batch.

    Attributes:
        mask: (batch, 1, 1, time), 1 for valid frames and 0 for padding; None without padding.
        counts: (batch, 1), the number of valid frames of each item.
    """

    mask: Tensor | None
    counts: Tensor

    @classmethod
    def from_lengths(cls, lengths: Tensor, frames: Tensor) -> _Validity:
        num_frames = frames.shape[-1]
        mask = None
        if int(lengths.min()) < num_frames:
            mask = (torch.arange(num_frames) < lengths[:, None])[:, None, None].to(frames.dtype)
        return cls(mask, lengths[:, None].to(frames.dtype))

    def zero_padding(self, frames: Tensor) -> Tensor:
        """Set the padding to zero, in place."""
        return frames if self.mask is None else frames.mul_(self.mask)


def fit_hifigan_to_cpu(encoder: nn.Module) -> nn.Module:
    """Return a fast CPU version of a codec's encoder; return an unknown encoder unchanged."""
    from nemo.collections.tts.modules.audio_codec_modules import CausalHiFiGANEncoder, HiFiGANEncoder

    if type(encoder) in (CausalHiFiGANEncoder, HiFiGANEncoder):
        with suppress(_UnknownLayer):
            return _HifiganEncoder(encoder, causal=type(encoder) is CausalHiFiGANEncoder)
    return encoder


class _PaddedConv:
    """A CausalConv1dNorm or Conv1dNorm, together with the activation before it."""

    def __init__(self, layer: Any, activation: CodecActivation | None, *, causal: bool) -> None:
        conv = layer.conv
        self._activate = _activation_in_place(activation)
        self._is_causal = causal
        mode = layer.extra_pad_mode if causal else conv.padding_mode
        self._mode = "constant" if mode == "zeros" else mode
        known = ("constant",) if causal else ("constant", "reflect")
        if not isinstance(layer.activation, nn.Identity) or self._mode not in known:
            raise _UnknownLayer
        self._padding = int(layer.padding_total) if causal else conv.padding[0]
        self._conv = _Conv(
            _channels_last(conv.weight.detach()), conv.bias.detach(), conv.stride[0], 0, conv.dilation[0]
        )

    def __call__(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Map (batch, inputs, 1, time) to (batch, outputs, 1, time); ``lengths`` (batch,) are the outputs' lengths."""
        after = -values.shape[3] % self._conv.stride if self._is_causal else self._padding
        # Padding makes a copy, so the activation can work in place. It can follow the padding because it maps zero to
        # zero.
        values = self._activate(functional.pad(values, (self._padding, after, 0, 0), self._mode))
        values = self._conv(values)
        return values if self._is_causal else _Validity.from_lengths(lengths, values).zero_padding(values)


def _activation_in_place(activation: CodecActivation | None) -> Callable[[Tensor], Tensor]:
    function = None if activation is None else activation.activation
    if function is None:
        return lambda values: values
    if isinstance(function, nn.LeakyReLU):
        return partial(functional.leaky_relu_, negative_slope=function.negative_slope)
    if isinstance(function, nn.ELU):
        return partial(functional.elu_, alpha=function.alpha)
    return lambda values: _channels_last(function(values[:, :, 0]))


class _ResidualLayer:
    """A HiFiGANResLayer: the mean of blocks of residual convolutions."""

    def __init__(self, layer: HiFiGANResLayer, *, causal: bool) -> None:
        self._blocks = [
            [
                (
                    _PaddedConv(block.input_conv, block.input_activation, causal=causal),
                    _PaddedConv(block.skip_conv, block.skip_activation, causal=causal),
                )
                for block in blocks.res_blocks
            ]
            for blocks in layer.res_blocks
        ]

    def __call__(self, values: Tensor, lengths: Tensor) -> Tensor:
        outputs = [self._apply(block, values, lengths) for block in self._blocks]
        return outputs[0] if len(outputs) == 1 else sum(outputs[1:], outputs[0]) / len(outputs)

    @staticmethod
    def _apply(block: list[tuple[_PaddedConv, _PaddedConv]], values: Tensor, lengths: Tensor) -> Tensor:
        for first, second in block:
            values = second(first(values, lengths), lengths).add_(values)
        return values


class _HifiganEncoder(nn.Module):
    """Replacement for a CausalHiFiGANEncoder or a HiFiGANEncoder."""

    def __init__(self, encoder: Any, *, causal: bool) -> None:
        super().__init__()
        self._first = _PaddedConv(encoder.pre_conv, None, causal=causal)
        self._stages = [
            (_ResidualLayer(layer, causal=causal), _PaddedConv(conv, activation, causal=causal), rate)
            for layer, activation, conv, rate in zip(
                encoder.res_layers, encoder.activations, encoder.down_sample_conv_layers, encoder.down_sample_rates,
                strict=True,
            )
        ]  # fmt: skip
        self._last = _PaddedConv(encoder.post_conv, encoder.post_activation, causal=causal)

    def forward(self, audio: Tensor, audio_len: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoded frames (batch, channels, frames), zero beyond each item's end, and the items' lengths.

        Args:
            audio: (batch, samples).
            audio_len: (batch,), the number of samples of each item.
        """
        lengths = audio_len
        values = self._first(_channels_last(audio[:, None]), lengths)
        for residual, down, rate in self._stages:
            values = residual(values, lengths)
            lengths = lengths // rate
            values = down(values, lengths)
        values = self._last(values, lengths)
        return _Validity.from_lengths(lengths, values).zero_padding(values)[:, :, 0], lengths


def fit_titanet_to_cpu(model: EncDecSpeakerLabelModel) -> None:
    """Replace the encoder and attentive pooling of a model with fast CPU versions, unless a layer is unknown."""
    from nemo.collections.asr.modules import ConvASREncoder
    from nemo.collections.asr.parts.submodules.tdnn_attention import AttentivePoolLayer

    pooling = getattr(model.decoder, "_pooling", None)
    with suppress(_UnknownLayer):
        if type(model.encoder) is ConvASREncoder:
            model.encoder = _TitanetEncoder(model.encoder)
        if type(pooling) is AttentivePoolLayer:
            model.decoder._pooling = _AttentivePooling(pooling)


class _Block:
    """A JasperBlock: convolutions with ReLU, and optionally squeeze-and-excitation and a residual convolution."""

    def __init__(self, block: JasperBlock) -> None:
        from nemo.collections.asr.parts.submodules.jasper import SqueezeExcite

        if block.residual_mode != "add" or block.dense_residual or block.is_adapter_available():
            raise _UnknownLayer
        layers = list(block.mconv)
        self._excite = None
        if isinstance(layers[-1], SqueezeExcite) and layers[-1].context_window < 0:
            self._excite = layers.pop().fc
        self._layers = _known_layers(layers)
        self._residual = _known_layers(block.res[0] if block.res else [])
        self._activation = _known_layers(block.mout)

    def __call__(self, frames: Tensor, valid: _Validity) -> Tensor:
        """Map (batch, inputs, 1, time) to (batch, outputs, 1, time); padding of the input is set to zero in place."""
        out = _apply(self._layers, frames, valid)
        if self._excite is not None:
            means = valid.zero_padding(out).sum((2, 3)) / valid.counts
            out = out.mul_(torch.sigmoid(self._excite(means))[:, :, None, None])
        if self._residual:
            out = out.add_(_apply(self._residual, frames, valid))
        return _apply(self._activation, out, valid)


def _known_layers(modules: Iterable[nn.Module]) -> list[_Conv | nn.ReLU]:
    from nemo.collections.asr.parts.submodules.jasper import MaskedConv1d

    layers: list[_Conv | nn.ReLU] = []
    modules = [module for module in modules if not isinstance(module, nn.Dropout)]
    for module, following in pairwise([*modules, None]):
        if isinstance(module, MaskedConv1d) and module.use_mask and module.pad_layer is None and module.heads == -1:
            layer = _Conv.from_layer(module.conv, following if isinstance(following, nn.BatchNorm1d) else None)
            if layer.stride != 1 or 2 * layer.padding != layer.dilation * (layer.kernel_size - 1):
                raise _UnknownLayer
            layers.append(layer)
        elif isinstance(module, nn.ReLU):
            layers.append(module)
        elif not (isinstance(module, nn.BatchNorm1d) and layers and isinstance(layers[-1], _Conv)):
            raise _UnknownLayer
    return layers


def _apply(layers: list[_Conv | nn.ReLU], frames: Tensor, valid: _Validity) -> Tensor:
    for layer in layers:
        # With a kernel size of 1, padding does not affect other frames.
        mixes = isinstance(layer, _Conv) and layer.kernel_size > 1
        frames = layer(valid.zero_padding(frames) if mixes else frames)
    return frames


class _TitanetEncoder(nn.Module):
    """Replacement for a ConvASREncoder."""

    def __init__(self, encoder: ConvASREncoder) -> None:
        super().__init__()
        self._blocks = [_Block(block) for block in encoder.encoder]

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Map features to encoded frames, both (batch, channels, time); return them with the items' lengths."""
        frames = _channels_last(audio_signal)
        valid = _Validity.from_lengths(length, frames)
        for block in self._blocks:
            frames = block(frames, valid)
        return frames[:, :, 0], length


class _AttentivePooling(nn.Module):
    """Replacement for an AttentivePoolLayer.

    The input of the first attention layer is each frame together with the mean and standard deviation of all frames.
    The terms for mean and deviation are the same for all frames, and are computed only once.
    """

    def __init__(self, pooling: AttentivePoolLayer) -> None:
        super().__init__()
        first, _, last = pooling.attention_layer
        channels = last.out_channels
        of_all = _Conv.from_layer(first.conv_layer)
        self._of_frames = replace(of_all, weight=of_all.weight[:, :channels].contiguous(), bias=None)
        self._of_statistics = replace(of_all, weight=of_all.weight[:, channels:].contiguous())
        norm = first.bn
        self._normalize = partial(
            functional.batch_norm,
            running_mean=norm.running_mean, running_var=norm.running_var,
            weight=norm.weight, bias=norm.bias, eps=norm.eps,
        )  # fmt: skip
        self._last = _Conv.from_layer(last)
        self._eps = pooling.eps
        if self._of_frames.kernel_size > 1 or self._last.kernel_size > 1:
            raise _UnknownLayer

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """Return attention-weighted means and deviations (batch, 2 * channels, 1) of frames (batch, channels, time)."""
        frames = _channels_last(x)
        valid = _Validity.from_lengths(length, frames)
        even = torch.ones(1) if valid.mask is None else valid.mask
        attended = self._of_frames(frames)
        attended += self._of_statistics(self._statistics(frames, even / valid.counts[:, :, None, None]))
        attended = self._last(self._normalize(attended.relu_()).tanh_())
        if valid.mask is not None:
            attended.masked_fill_(valid.mask == 0, -torch.inf)
        # Computing the softmax over this transposed view avoids a transposed copy.
        weights = torch.softmax(attended[:, :, 0].transpose(1, 2), 1).transpose(1, 2)[:, :, None]
        return self._statistics(frames, weights)[:, :, 0]

    def _statistics(self, frames: Tensor, weights: Tensor) -> Tensor:
        """Return weighted means and standard deviations over time: (batch, 2 * channels, 1, 1)."""
        means = (frames * weights).sum(3, keepdim=True)
        squares = (frames - means).square_().mul_(weights).sum(3, keepdim=True)
        return torch.cat((means, squares.clamp_(min=self._eps).sqrt_()), dim=1)
