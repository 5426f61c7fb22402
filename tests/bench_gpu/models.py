"""Models of real size with random weights as checkpoints of NeMo and transformers, and small ones for a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bench.encode import save_codec
from support.models import save_mimi
from transformers import MimiConfig

ENCODER = "speaker encoder in TitaNet-large's sizes"
CODEC = "codec of NeMo's kind and size"
# Filters of the convolutions, values of the last, and channels of the first layer of the codec.
REAL = {"filters": 1024, "last_filters": 3072, "channels": 48}
SMALL = {"filters": 64, "last_filters": 128, "channels": 2}


def save_titanet(path: Path, *, filters: int, last_filters: int) -> Path:
    """Write an EncDecSpeakerLabelModel with the layers of TitaNet-large; its classes of speakers are left out."""
    from nemo.collections.asr.models import EncDecSpeakerLabelModel
    from omegaconf import OmegaConf

    modules = "nemo.collections.asr.modules"
    layer = {"repeat": 3, "stride": [1], "dilation": [1], "dropout": 0.1, "residual": True, "separable": True}
    layer |= {"se": True, "se_context_size": -1, "filters": filters}
    once = layer | {"repeat": 1, "residual": False}
    blocks = [once | {"kernel": [3]}, *(layer | {"kernel": [size]} for size in (7, 11, 15))]
    config: dict[str, Any] = {
        "sample_rate": 16000,
        "preprocessor": {
            "_target_": f"{modules}.AudioToMelSpectrogramPreprocessor", "sample_rate": 16000, "features": 80,
            "normalize": "per_feature", "window_size": 0.025, "window_stride": 0.01, "window": "hann", "n_fft": 512,
            "dither": 1e-5,
        },
        "encoder": {
            "_target_": f"{modules}.ConvASREncoder", "feat_in": 80, "activation": "relu", "conv_mask": True,
            "jasper": [*blocks, once | {"kernel": [1], "filters": last_filters}],
        },
        "decoder": {
            "_target_": f"{modules}.SpeakerDecoder", "feat_in": last_filters, "num_classes": 5,
            "pool_mode": "attention", "emb_sizes": 192,
        },
    }  # fmt: skip
    torch.manual_seed(1)
    EncDecSpeakerLabelModel(cfg=OmegaConf.create(config)).save_to(str(path))
    return path


def save_models(folder: Path, *, is_small: bool) -> dict[str, str]:
    """Write models, and return their names for a configuration, by what the rows call them.

    Mimi of real size has the defaults of its configuration, which are those of kyutai/mimi.
    """
    sizes = SMALL if is_small else REAL
    encoder = save_titanet(
        folder / "titanet.nemo", filters=sizes["filters"], last_filters=sizes["last_filters"]
    )  # fmt: skip
    codec = save_codec(folder / "codec.nemo", base_channels=sizes["channels"])
    mimi = save_mimi(folder / "mimi", None if is_small else MimiConfig())
    return {ENCODER: f"nemo:{encoder}", CODEC: f"nemo:{codec}", "Mimi": f"transformers:{mimi}"}
