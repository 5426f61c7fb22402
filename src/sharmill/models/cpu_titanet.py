"""The layers of NeMo's TitaNet and its kin as a CPU computes them fastest; see ``channels_last``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from sharmill.models.channels_last import Conv, UnknownLayer, channels_last, mask_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nemo.collections.asr.models import EncDecSpeakerLabelModel
    from nemo.collections.asr.modules import ConvASREncoder
    from nemo.collections.asr.parts.submodules.jasper import JasperBlock
    from nemo.collections.asr.parts.submodules.tdnn_attention import AttentivePoolLayer
    from torch import Tensor


def fit_titanet_to_cpu(model: EncDecSpeakerLabelModel) -> None:
    """Replace the encoder and the attentive pooling of a model on the CPU; what is not known stays NeMo's own."""
    from nemo.collections.asr.modules import ConvASREncoder
    from nemo.collections.asr.parts.submodules.tdnn_attention import AttentivePoolLayer

    pooling = getattr(model.decoder, "_pooling", None)
    try:
        if type(model.encoder) is ConvASREncoder:
            model.encoder = _Encoder(model.encoder)
        if type(pooling) is AttentivePoolLayer:
            model.decoder._pooling = _AttentivePooling(pooling)
    except UnknownLayer:
        return


@dataclass(frozen=True)
class _Validity:
    """Mask (batch, 1, 1, time) of the frames that are no padding, None where all are, and how many each item has."""

    mask: Tensor | None
    counts: Tensor

    @classmethod
    def of(cls, lengths: Tensor, frames: Tensor) -> _Validity:
        num_frames = frames.shape[-1]
        mask = mask_of(lengths, num_frames).to(frames.dtype) if int(lengths.min()) < num_frames else None
        return cls(mask, lengths[:, None].to(frames.dtype))

    def zero_padding(self, frames: Tensor) -> Tensor:
        """Set what is padding to zero, in place."""
        return frames if self.mask is None else frames.mul_(self.mask)


class _Block:
    """A JasperBlock: convolutions with ReLU, a squeeze-and-excitation and a residual convolution, where it has them."""

    def __init__(self, block: JasperBlock) -> None:
        from nemo.collections.asr.parts.submodules.jasper import SqueezeExcite

        if block.residual_mode != "add" or block.dense_residual or block.is_adapter_available():
            raise UnknownLayer
        layers = list(block.mconv)
        self._excite = None
        if isinstance(layers[-1], SqueezeExcite) and layers[-1].context_window < 0:
            self._excite = layers.pop().fc
        self._layers = _known_layers(layers)
        self._residual = _known_layers(block.res[0] if block.res else [])
        self._activation = _known_layers(block.mout)

    def __call__(self, frames: Tensor, valid: _Validity) -> Tensor:
        """Return (batch, channels, 1, time); the input's padding is set to zero."""
        out = _apply(self._layers, frames, valid)
        if self._excite is not None:
            means = valid.zero_padding(out).sum((2, 3)) / valid.counts
            out = out.mul_(torch.sigmoid(self._excite(means))[:, :, None, None])
        if self._residual:
            out = out.add_(_apply(self._residual, frames, valid))
        return _apply(self._activation, out, valid)


def _known_layers(modules: Iterable[nn.Module]) -> list[Conv | nn.ReLU]:
    from nemo.collections.asr.parts.submodules.jasper import MaskedConv1d

    layers: list[Conv | nn.ReLU] = []
    modules = [module for module in modules if not isinstance(module, nn.Dropout)]
    for module, following in pairwise([*modules, None]):
        if isinstance(module, MaskedConv1d) and module.use_mask and module.pad_layer is None and module.heads == -1:
            layer = Conv.of(module.conv, following if isinstance(following, nn.BatchNorm1d) else None)
            if not layer.keeps_length:
                raise UnknownLayer
            layers.append(layer)
        elif isinstance(module, nn.ReLU):
            layers.append(module)
        elif not (isinstance(module, nn.BatchNorm1d) and layers and isinstance(layers[-1], Conv)):
            raise UnknownLayer
    return layers


def _apply(layers: list[Conv | nn.ReLU], frames: Tensor, valid: _Validity) -> Tensor:
    for layer in layers:
        # What one tap makes of padding stays in the padding.
        mixes = isinstance(layer, Conv) and layer.kernel_size > 1
        frames = layer(valid.zero_padding(frames) if mixes else frames)
    return frames


class _Encoder(nn.Module):
    """Encoder in place of a ConvASREncoder."""

    def __init__(self, encoder: ConvASREncoder) -> None:
        super().__init__()
        self._blocks = [_Block(block) for block in encoder.encoder]

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return encoded frames (batch, channels, time), and how many each item has, of features of that shape."""
        frames = channels_last(audio_signal)
        valid = _Validity.of(length, frames)
        for block in self._blocks:
            frames = block(frames, valid)
        return frames[:, :, 0], length


class _AttentivePooling(nn.Module):
    """Pooling in place of an AttentivePoolLayer.

    The first layer of its attention sees every frame beside the mean and the deviation of all. What it makes of those
    two is the same for all frames, and computed once.
    """

    def __init__(self, pooling: AttentivePoolLayer) -> None:
        super().__init__()
        first, _, last = pooling.attention_layer
        channels = last.out_channels
        of_all = Conv.of(first.conv_layer)
        self._of_frames = replace(of_all, weight=of_all.weight[:, :channels].contiguous(), bias=None)
        self._of_statistics = replace(of_all, weight=of_all.weight[:, channels:].contiguous())
        norm = first.bn
        self._normalize = partial(
            functional.batch_norm,
            running_mean=norm.running_mean, running_var=norm.running_var,
            weight=norm.weight, bias=norm.bias, eps=norm.eps,
        )  # fmt: skip
        self._last = Conv.of(last)
        self._eps = pooling.eps
        if self._of_frames.kernel_size > 1 or self._last.kernel_size > 1:
            raise UnknownLayer

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """Return the mean and the deviation of encoded frames, weighted by attention: (batch, 2 * channels, 1)."""
        frames = channels_last(x)
        valid = _Validity.of(length, frames)
        even = torch.ones(1) if valid.mask is None else valid.mask
        attended = self._of_frames(frames)
        attended += self._of_statistics(self._statistics(frames, even / valid.counts[:, :, None, None]))
        attended = self._last(self._normalize(attended.relu_()).tanh_())
        if valid.mask is not None:
            attended.masked_fill_(valid.mask == 0, -torch.inf)
        # Along the frames of this view softmax is computed in place of a transposed copy.
        weights = torch.softmax(attended[:, :, 0].transpose(1, 2), 1).transpose(1, 2)[:, :, None]
        return self._statistics(frames, weights)[:, :, 0]

    def _statistics(self, frames: Tensor, weights: Tensor) -> Tensor:
        """Return weighted means and deviations over time, (batch, 2 * channels, 1, 1)."""
        means = (frames * weights).sum(3, keepdim=True)
        squares = (frames - means).square_().mul_(weights).sum(3, keepdim=True)
        return torch.cat((means, squares.clamp_(min=self._eps).sqrt_()), dim=1)
