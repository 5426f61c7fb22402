"""The encoder of NeMo's codecs as a CPU computes it fastest; see ``channels_last``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import functional

from sharmill.models.channels_last import Conv, UnknownLayer, channels_last, mask_of

if TYPE_CHECKING:
    from nemo.collections.tts.modules.audio_codec_modules import CodecActivation, HiFiGANResLayer
    from torch import Tensor


def fit_hifigan_to_cpu(encoder: nn.Module) -> nn.Module:
    """Return what encodes as a codec's encoder does, on the CPU; an encoder that is not known stays NeMo's own."""
    from nemo.collections.tts.modules.audio_codec_modules import CausalHiFiGANEncoder, HiFiGANEncoder

    if type(encoder) in (CausalHiFiGANEncoder, HiFiGANEncoder):
        try:
            return _Encoder(encoder, causal=type(encoder) is CausalHiFiGANEncoder)
        except UnknownLayer:
            pass
    return encoder


class _PaddedConv:
    """A CausalConv1dNorm or Conv1dNorm, and the activation before it."""

    def __init__(self, layer: Any, activation: CodecActivation | None, *, causal: bool) -> None:
        conv = layer.conv
        self._activate = _activation_in_place(activation)
        self._is_causal = causal
        mode = layer.extra_pad_mode if causal else conv.padding_mode
        self._mode = "constant" if mode == "zeros" else mode
        known = ("constant",) if causal else ("constant", "reflect")
        if not isinstance(layer.activation, nn.Identity) or self._mode not in known:
            raise UnknownLayer
        self._padding = int(layer.padding_total) if causal else conv.padding[0]
        self._conv = Conv(channels_last(conv.weight.detach()), conv.bias.detach(), conv.stride[0], 0, conv.dilation[0])

    def __call__(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return (batch, outputs, 1, time), of values of that shape; ``lengths`` (batch,) are those of the outputs."""
        after = -values.shape[3] % self._conv.stride if self._is_causal else self._padding
        # A copy, so that the rest can be done in place. No activation makes anything of zeros, nor of their order.
        values = self._activate(functional.pad(values, (self._padding, after, 0, 0), self._mode))
        values = self._conv(values)
        return values if self._is_causal else _zero_padding(values, lengths)


def _activation_in_place(activation: CodecActivation | None) -> Callable[[Tensor], Tensor]:
    function = None if activation is None else activation.activation
    if function is None:
        return lambda values: values
    if isinstance(function, nn.LeakyReLU):
        return partial(functional.leaky_relu_, negative_slope=function.negative_slope)
    if isinstance(function, nn.ELU):
        return partial(functional.elu_, alpha=function.alpha)
    return lambda values: channels_last(function(values[:, :, 0]))


def _zero_padding(values: Tensor, lengths: Tensor) -> Tensor:
    """Set what lies beyond each item's end to zero, in place."""
    return values.mul_(mask_of(lengths, values.shape[3]))


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


class _Encoder(nn.Module):
    """Encoder in place of a CausalHiFiGANEncoder or a HiFiGANEncoder."""

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
        """Return the encoded frames, (batch, channels, frames), zero beyond each item's end, and how many each has.

        Args:
            audio: (batch, samples).
            audio_len: (batch,) samples of each item.
        """
        lengths = audio_len
        values = self._first(channels_last(audio[:, None]), lengths)
        for residual, down, rate in self._stages:
            values = residual(values, lengths)
            lengths = lengths // rate
            values = down(values, lengths)
        return _zero_padding(self._last(values, lengths), lengths)[:, :, 0], lengths
