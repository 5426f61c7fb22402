"""The codec that ships with the project: a real NeMo codec with seeded, untrained weights.

Its codes have the right shapes, rates and types, depend on the audio and are the same everywhere, so that a pipeline
can be tried out without any download. They mean nothing: never train on them.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final

import torch
from omegaconf import OmegaConf

from sharmill.models.families import BUILTIN_CONFIG
from sharmill.models.nemo_checkpoint import quiet_nemo
from sharmill.models.nemo_codec import NemoCodec

if TYPE_CHECKING:
    from nemo.collections.tts.models import AudioCodecModel
    from torch import nn

_logger = logging.getLogger(__name__)

# Keeps the variance through layers with leaky rectifiers (He et al., https://arxiv.org/abs/1502.01852).
_LAYER_GAIN: Final = math.sqrt(2.0)
_GRID: Final = 1 << 11


def load_untrained_codec(device: str) -> NemoCodec:
    """Build the built-in codec and warns that it is untrained.

    Raises:
        ConfigError: if NeMo is not installed.
    """
    _logger.warning("codec 'builtin' is UNTRAINED: its codes are for trying out the pipeline only, never train on them")
    return NemoCodec(build_untrained_model(), "builtin", device, trained=False)


def build_untrained_model() -> AudioCodecModel:
    """Return the NeMo model behind the built-in codec, the same in every process; leave the random state alone."""
    config = OmegaConf.load(BUILTIN_CONFIG)
    with quiet_nemo(), torch.random.fork_rng(devices=[]):
        from nemo.collections.tts.models import AudioCodecModel

        model = AudioCodecModel(cfg=config.model)
    _seed_weights(model.audio_encoder, int(config.seed), float(config.input_gain))
    model.freeze()
    return model.eval()


def _seed_weights(encoder: nn.Module, seed: int, input_gain: float) -> None:
    """Set weights whose bits depend on the seed alone.

    The directions are integers divided by a power of two, and the norms constants: no logarithm, sum or root, whose
    last bit would depend on the processor, enters the checksum. Without biases the output is proportional to the
    audio, and the gain of the first layer brings speech into the range of the quantizer.
    """
    generator = torch.Generator().manual_seed(seed)
    gains = {"pre_conv.conv": _LAYER_GAIN * input_gain}
    with torch.no_grad():
        for name, module in encoder.named_modules():
            if not hasattr(module, "parametrizations"):
                continue
            norm, direction = module.parametrizations.weight.original0, module.parametrizations.weight.original1
            direction.copy_(torch.randint(-_GRID, _GRID, direction.shape, generator=generator) / _GRID)
            norm.fill_(gains.get(name, _LAYER_GAIN))
            module.bias.zero_()
