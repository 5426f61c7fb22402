"""Small models of the codecs in examples/codecs/, in the form in which the published ones are loaded.

Every function writes a model and returns the name that a configuration has for its codec.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SNAC = {
    "sampling_rate": 16000, "encoder_dim": 16, "encoder_rates": [4, 8], "decoder_dim": 16, "decoder_rates": [8, 4],
    "codebook_size": 64, "codebook_dim": 4, "vq_strides": [4, 2, 1],
}  # fmt: skip


def save_snac(folder: Path, **changes: Any) -> str:
    """A SNAC at 16 kHz: 7 rows of 64, 128 samples per frame."""
    from snac import SNAC as Model

    config = SNAC | changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = Model(**config).state_dict()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(weights, folder / "pytorch_model.bin")
    return f"python:snac_codec:SnacCodec:{folder}"


def save_s3(name: str) -> str:
    """An S3 tokenizer of the name of a published one, in the package's cache below XDG_CACHE_HOME."""
    from support import small_s3

    small_s3.save(name)
    return f"python:support.small_s3:S3Codec:{name}"


def save_xcodec2(folder: Path) -> str:
    """An X-Codec-2 at 16 kHz: one codebook of 4 to the power of 8, 320 samples per frame."""
    import transformers

    return _save_fsq(folder, "XCodec2", transformers.Xcodec2Model, transformers.Xcodec2FeatureExtractor)


def save_neucodec(folder: Path) -> str:
    """A NeuCodec, like ``save_xcodec2``; it decodes to 24 kHz."""
    import transformers

    return _save_fsq(folder, "NeuCodec", transformers.NeuCodecModel, transformers.NeuCodecFeatureExtractor)


def _save_fsq(folder: Path, name: str, model_class: Any, extractor_class: Any) -> str:
    from transformers import Wav2Vec2BertConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = model_class.config_class(
        **sizes, num_key_value_heads=2, head_dim=16, encoder_hidden_size=4, quantization_dim=64,
        semantic_model_config=Wav2Vec2BertConfig(**sizes, conv_depthwise_kernel_size=5),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).eval()
        # Fresh weights are so small that all codes are the same.
        for parts, factor in (("acoustic_encoder", 9.0), ("semantic_adapter", 4.0), ("quantizer.project_in", 20.0)):
            for parameter in model.get_submodule(parts).parameters():
                parameter.data.mul_(factor if parameter.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    extractor_class().save_pretrained(folder)
    return f"python:xcodec2_codec:{name}:{folder}"
