"""Small seeded models of the real classes, written as real checkpoints, and audio for them.

Every ``save_`` function writes to a path and returns it. The caller's random state is left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TTS = "nemo.collections.tts"
ASR = "nemo.collections.asr.modules"


def make_audio(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 audio (batch, longest) like voices, zero beyond each item, and the lengths in samples."""
    generator = torch.Generator().manual_seed(seed)
    audio = torch.zeros(len(lengths), max(lengths))
    for item, length in enumerate(lengths):
        time = torch.arange(length) / 16000
        tone = torch.sin(2 * torch.pi * (110 + 40 * item) * time) * torch.sin(2 * torch.pi * 3 * time)
        audio[item, :length] = 0.2 * tone + 0.05 * torch.randn(length, generator=generator)
    return audio, torch.tensor(lengths)


def save_nemo_speaker(path: Path, *, masked: bool = True) -> Path:
    """An EncDecSpeakerLabelModel at 16 kHz with 24 values per embedding: TitaNet's kind of layers, far fewer of them.

    Args:
        masked: False for convolutions that see the padding of a batch.
    """
    from nemo.collections.asr.models import EncDecSpeakerLabelModel
    from omegaconf import OmegaConf

    layer = {"repeat": 1, "stride": [1], "dilation": [1], "dropout": 0.1, "residual": False, "separable": True}
    config = {
        "sample_rate": 16000,
        "preprocessor": _mel_preprocessor(20),
        "encoder": {
            "_target_": f"{ASR}.ConvASREncoder",
            "feat_in": 20,
            "activation": "relu",
            "conv_mask": masked,
            "jasper": [
                layer | {"filters": 32, "kernel": [3], "se": masked, "se_context_size": -1},
                layer | {"filters": 48, "kernel": [7]},
            ],
        },
        "decoder": {
            "_target_": f"{ASR}.SpeakerDecoder",
            "feat_in": 48,
            "num_classes": 5,
            "pool_mode": "attention",
            "emb_sizes": 24,
        },
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = EncDecSpeakerLabelModel(cfg=OmegaConf.create(config))
        # Fresh biases of 0 would turn padding into 0, so that no layer could see it.
        for name, parameter in model.encoder.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(std=0.5)
    model.save_to(str(path))
    return path


def save_titanet(path: Path) -> Path:
    """A TitaNet of 1.9 M parameters at 16 kHz, with the blocks and the embeddings of the large one."""
    from nemo.collections.asr.models import EncDecSpeakerLabelModel
    from omegaconf import OmegaConf

    layer = {"repeat": 3, "stride": [1], "dilation": [1], "dropout": 0.1, "residual": True, "separable": True}
    layer |= {"se": True, "se_context_size": -1, "filters": 256}
    once = layer | {"repeat": 1, "residual": False}
    blocks = [once | {"kernel": [3]}, *(layer | {"kernel": [size]} for size in (7, 11, 15))]
    config = {
        "sample_rate": 16000,
        "preprocessor": _mel_preprocessor(80),
        "encoder": {
            "_target_": f"{ASR}.ConvASREncoder",
            "feat_in": 80,
            "activation": "relu",
            "conv_mask": True,
            "jasper": [*blocks, once | {"kernel": [1], "filters": 768}],
        },
        "decoder": {
            "_target_": f"{ASR}.SpeakerDecoder",
            "feat_in": 768,
            "num_classes": 5,
            "pool_mode": "attention",
            "emb_sizes": 192,
        },
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        EncDecSpeakerLabelModel(cfg=OmegaConf.create(config)).save_to(str(path))
    return path


def nemo_codec_config(*, causal: bool = True, samples_per_frame: int = 32) -> dict[str, Any]:
    """Configuration of an AudioCodecModel at 16 kHz: 3 codebooks of 60, 32 samples per frame.

    Args:
        causal: False for an encoder which sees the padding of a batch.
        samples_per_frame: what the configuration claims; the encoder always makes a frame from 32 samples.
    """
    modules, losses = f"{TTS}.modules.audio_codec_modules", f"{TTS}.losses.audio_codec_loss"
    blocks = {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [1], "in_kernel_size": 3, "out_kernel_size": 3}
    return {
        "sample_rate": 16000,
        "samples_per_frame": samples_per_frame,
        "audio_encoder": blocks
        | {
            "_target_": f"{modules}.{'CausalHiFiGANEncoder' if causal else 'HiFiGANEncoder'}",
            "encoded_dim": 9,
            "down_sample_rates": [4, 8],
            "base_channels": 4,
        },
        "vector_quantizer": {
            "_target_": f"{modules}.GroupFiniteScalarQuantizer",
            "num_groups": 3,
            "num_levels_per_group": [5, 4, 3],
        },
        "audio_decoder": blocks
        | {
            "_target_": f"{modules}.CausalHiFiGANDecoder",
            "input_dim": 9,
            "up_sample_rates": [8, 4],
            "base_channels": 8,
        },
        "loss_resolutions": [[64, 16, 64]],
        "mel_loss_dims": [5],
        "commit_loss_scale": 0.0,
        "generator_loss": {"_target_": f"{losses}.GeneratorSquaredLoss"},
        "discriminator_loss": {"_target_": f"{losses}.DiscriminatorSquaredLoss"},
    }


def save_nemo_codec(path: Path, config: dict[str, Any] | None = None) -> Path:
    """An AudioCodecModel with weights so large that its codes vary; see ``nemo_codec_config``."""
    from nemo.collections.tts.models import AudioCodecModel
    from omegaconf import OmegaConf

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = AudioCodecModel(cfg=OmegaConf.create(config or nemo_codec_config()))
        for name, parameter in model.audio_encoder.named_parameters():
            if name.endswith("weight.original0"):
                parameter.data.mul_(4.0)
    model.save_to(str(path))
    return path


def save_encodec(path: Path, **changes: Any) -> Path:
    """A causal EncodecModel at 16 kHz: 8 codebooks of 64, 32 samples per frame, mirror padding like the real one."""
    from transformers import EncodecConfig, EncodecModel

    settings: dict[str, Any] = {
        "sampling_rate": 16000,
        "target_bandwidths": [6.0, 24.0],
        "num_filters": 4,
        "hidden_size": 16,
        "codebook_size": 64,
        "upsampling_ratios": [8, 4],
        "num_lstm_layers": 1,
    }
    return _save(EncodecModel, EncodecConfig(**settings | changes), path)


def save_mimi(path: Path, config: Any = None) -> Path:
    """A MimiModel: by default at 16 kHz, with 4 codebooks of 64 and 64 samples per frame."""
    from transformers import MimiConfig, MimiModel

    small = MimiConfig(
        sampling_rate=16000,
        num_filters=4,
        hidden_size=32,
        upsampling_ratios=[8, 4],
        codebook_size=64,
        codebook_dim=16,
        vector_quantization_hidden_dimension=16,
        num_quantizers=4,
        num_hidden_layers=2,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=20,
        upsample_groups=32,
    )
    return _save(MimiModel, config or small, path)


def save_dac(path: Path) -> Path:
    """A DacModel at 16 kHz: 3 codebooks of 64, 32 samples per frame."""
    from transformers import DacConfig, DacModel

    config = DacConfig(
        encoder_hidden_size=4,
        downsampling_ratios=[4, 8],
        decoder_hidden_size=16,
        n_codebooks=3,
        codebook_size=64,
        codebook_dim=4,
    )
    return _save(DacModel, config, path)


def _save(model_class: type[Any], config: Any, path: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = model_class(config).eval()
        # Fresh codebooks are zeros, or so small that all codes are the same.
        for name, tensor in model.state_dict().items():
            if name.endswith(("codebook.embed", "codebook.embed_sum", "codebook.weight")):
                tensor.normal_(std=0.1)
            elif name.endswith("codebook.cluster_usage"):
                tensor.fill_(1.0)
            elif name.startswith("encoder") and tensor.ndim == 3:
                tensor.mul_(2.0)
    model.save_pretrained(path)
    return path


def _mel_preprocessor(features: int) -> dict[str, Any]:
    return {
        "_target_": f"{ASR}.AudioToMelSpectrogramPreprocessor",
        "sample_rate": 16000,
        "normalize": "per_feature",
        "window_size": 0.025,
        "window_stride": 0.01,
        "window": "hann",
        "features": features,
        "n_fft": 512,
        "dither": 1e-5,
    }
