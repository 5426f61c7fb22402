"""Small seeded models of the real classes, written as real checkpoints, and audio for them.

Every ``save_`` function writes to a path and returns it. The caller's random state is left alone.
"""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from support.project import put, voice, write_lines

TTS = "nemo.collections.tts"
ASR = "nemo.collections.asr.modules"
# Hidden size of tiny language models and recognizers.
HIDDEN = 32


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
    """Save an EncDecSpeakerLabelModel at 16 kHz with 24 values per embedding: TitaNet's kind of layers, far fewer.

    Args:
        masked: False for convolutions that see the padding of a batch.
    """
    layer = {"repeat": 1, "stride": [1], "dilation": [1], "dropout": 0.1, "residual": False, "separable": True}
    first = layer | {"filters": 32, "kernel": [3], "se": masked, "se_context_size": -1}
    return _save_speaker(path, 20, [first, layer | {"filters": 48, "kernel": [7]}], 24, masked=masked)


def save_titanet(path: Path, *, filters: int = 256, last_filters: int = 768) -> Path:
    """Save a TitaNet at 16 kHz with the blocks and the embeddings of the large one, of 1.9 M parameters by default."""
    layer = {"repeat": 3, "stride": [1], "dilation": [1], "dropout": 0.1, "residual": True, "separable": True}
    layer |= {"se": True, "se_context_size": -1, "filters": filters}
    once = layer | {"repeat": 1, "residual": False}
    blocks = [once | {"kernel": [3]}, *(layer | {"kernel": [size]} for size in (7, 11, 15))]
    return _save_speaker(path, 80, [*blocks, once | {"kernel": [1], "filters": last_filters}], 192)


def _save_speaker(
    path: Path, features: int, blocks: list[dict[str, Any]], embedding: int, *, masked: bool = True
) -> Path:
    from nemo.collections.asr.models import EncDecSpeakerLabelModel
    from omegaconf import OmegaConf

    config = {
        "sample_rate": 16000,
        "preprocessor": {
            "_target_": f"{ASR}.AudioToMelSpectrogramPreprocessor", "sample_rate": 16000, "normalize": "per_feature",
            "window_size": 0.025, "window_stride": 0.01, "window": "hann", "features": features, "n_fft": 512,
            "dither": 1e-5,
        },
        "encoder": {
            "_target_": f"{ASR}.ConvASREncoder", "feat_in": features, "activation": "relu", "conv_mask": masked,
            "jasper": blocks,
        },
        "decoder": {
            "_target_": f"{ASR}.SpeakerDecoder", "feat_in": blocks[-1]["filters"], "num_classes": 5,
            "pool_mode": "attention", "emb_sizes": embedding,
        },
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = EncDecSpeakerLabelModel(cfg=OmegaConf.create(config))
        # Fresh biases of 0 would turn padding into 0, so that no layer could see it.
        for name, parameter in model.encoder.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(std=0.5)
    model.save_to(str(path))
    return path


def save_nemo_ctc(path: Path) -> Path:
    """Save an EncDecCTCModel at 16 kHz that writes letters, with a single layer and random weights."""
    from nemo.collections.asr.models import EncDecCTCModel
    from omegaconf import OmegaConf

    letters = list(" abcdefghijklmnopqrstuvwxyz")
    layer = {"repeat": 1, "stride": [1], "dilation": [1], "dropout": 0.1, "residual": False, "separable": True}
    config = {
        "sample_rate": 16000,
        "labels": letters,
        "preprocessor": {
            "_target_": f"{ASR}.AudioToMelSpectrogramPreprocessor", "sample_rate": 16000, "normalize": "per_feature",
            "window_size": 0.025, "window_stride": 0.01, "window": "hann", "features": 20, "n_fft": 512,
        },
        "encoder": {
            "_target_": f"{ASR}.ConvASREncoder", "feat_in": 20, "activation": "relu", "conv_mask": True,
            "jasper": [layer | {"filters": 32, "kernel": [3]}],
        },
        "decoder": {
            "_target_": f"{ASR}.ConvASRDecoder", "feat_in": 32, "num_classes": len(letters), "vocabulary": letters,
        },
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = EncDecCTCModel(cfg=OmegaConf.create(config))
    model.save_to(str(path))
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


def _save_codec(kind: str, settings: dict[str, Any], path: Path, **changes: Any) -> Path:
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = getattr(transformers, f"{kind}Config")(**settings | changes)
        model = getattr(transformers, f"{kind}Model")(config).eval()
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


# A causal EncodecModel at 16 kHz: 8 codebooks of 64, 32 samples per frame, mirror padding like the real one.
save_encodec = partial(_save_codec, "Encodec", {
    "sampling_rate": 16000, "target_bandwidths": [6.0, 24.0], "num_filters": 4, "hidden_size": 16, "codebook_size": 64,
    "upsampling_ratios": [8, 4], "num_lstm_layers": 1,
})  # fmt: skip
# A MimiModel at 16 kHz, with 4 codebooks of 64 and 64 samples per frame.
save_mimi = partial(_save_codec, "Mimi", {
    "sampling_rate": 16000, "num_filters": 4, "hidden_size": 32, "upsampling_ratios": [8, 4], "codebook_size": 64,
    "codebook_dim": 16, "vector_quantization_hidden_dimension": 16, "num_quantizers": 4, "num_hidden_layers": 2,
    "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20,
    "upsample_groups": 32,
})  # fmt: skip
# A DacModel at 16 kHz: 3 codebooks of 64, 32 samples per frame.
save_dac = partial(_save_codec, "Dac", {
    "encoder_hidden_size": 4, "downsampling_ratios": [4, 8], "decoder_hidden_size": 16, "n_codebooks": 3,
    "codebook_size": 64, "codebook_dim": 4,
})  # fmt: skip


def save_canary_tokenizers(folder: Path) -> dict[str, Path]:
    """Train the tokenizer of special tokens, and one of English of ten pieces; return their folders by language."""
    from nemo.collections.common.tokenizers.canary_tokenizer import CanaryTokenizer
    from nemo.collections.common.tokenizers.sentencepiece_tokenizer import create_spt_model

    CanaryTokenizer.build_special_tokenizer(["en", "de", "transcribe", "translate"], folder / "spl")
    (folder / "text.txt").write_text("ab cd\nab\ncd ab cd\n")
    create_spt_model(
        str(folder / "text.txt"), vocab_size=10, sample_size=-1, do_lower_case=False, output_dir=str(folder / "en")
    )
    return {"spl_tokens": folder / "spl", "en": folder / "en"}


def save_multitask_config(folder: Path) -> Path:
    """Write the YAML of an EncDecMultiTaskModel, as Canary is one: a Conformer and a decoder of one layer each."""
    tokenizers = save_canary_tokenizers(folder)
    model = {
        "sample_rate": 16000,
        "prompt_format": "canary",
        "model_defaults": {"asr_enc_hidden": HIDDEN, "lm_enc_hidden": HIDDEN, "lm_dec_hidden": HIDDEN},
        "train_ds": {"manifest_filepath": "???"},
        "tokenizer": {
            "dir": None, "type": "agg",
            "langs": {language: {"dir": str(path), "type": "bpe"} for language, path in tokenizers.items()},
            "custom_tokenizer": {
                "_target_": "nemo.collections.common.tokenizers.canary_tokenizer.CanaryTokenizer", "tokenizers": None
            },
        },
        "preprocessor": {"_target_": f"{ASR}.AudioToMelSpectrogramPreprocessor", "features": 16, "sample_rate": 16000},
        "encoder": {
            "_target_": f"{ASR}.ConformerEncoder", "feat_in": 16, "n_layers": 1, "d_model": HIDDEN, "n_heads": 2,
            "feat_out": -1, "conv_kernel_size": 5, "subsampling": "dw_striding", "subsampling_factor": 8,
            "subsampling_conv_channels": 8, "ff_expansion_factor": 2,
        },
        "transf_encoder": {
            "_target_": f"{ASR}.transformer.transformer_encoders.TransformerEncoder", "num_layers": 0,
            "hidden_size": HIDDEN, "inner_size": 64, "num_attention_heads": 2,
        },
        "transf_decoder": {
            "_target_": f"{ASR}.transformer.get_nemo_transformer", "model_name": None, "pretrained": False,
            "encoder": None, "pre_ln_final_layer_norm": True,
            "config_dict": {
                "max_sequence_length": 512, "num_token_types": 0, "embedding_dropout": 0.0,
                "learn_positional_encodings": False, "hidden_size": HIDDEN, "inner_size": 64, "num_layers": 1,
                "num_attention_heads": 2, "ffn_dropout": 0.0, "attn_score_dropout": 0.0, "attn_layer_dropout": 0.0,
                "hidden_act": "relu", "pre_ln": True, "vocab_size": None,
            },
        },
        "head": {
            "_target_": "nemo.collections.asr.parts.submodules.token_classifier.TokenClassifier", "num_layers": 1,
            "activation": "relu", "log_softmax": True, "hidden_size": HIDDEN, "num_classes": None, "dropout": 0.0,
            "use_transformer_init": True,
        },
        "decoding": {
            "strategy": "beam", "return_best_hypothesis": True,
            "beam": {"beam_size": 1, "len_pen": 0.0, "max_generation_delta": 50},
        },
        "loss": {
            "_target_": "nemo.collections.common.losses.smoothed_cross_entropy.SmoothedCrossEntropyLoss",
            "label_smoothing": 0.0, "pad_id": None,
        },
        "optim": {"name": "adamw", "lr": 3e-4, "sched": {"name": "InverseSquareRootAnnealing", "warmup_steps": 2500}},
    }  # fmt: skip
    path = folder / "multitask.yaml"
    path.write_text(yaml.safe_dump({"name": "tiny", "model": model}))
    return path


PLACEHOLDER = "<|audioplaceholder|>"
# An encoder's frame, and the codec's: 1280 samples at 16 kHz.
FRAME = 0.08


def save_models(
    folder: Path, llm: Mapping[str, Any] | None = None, encoder: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Write a language model with its tokenizer, a recognizer and a codec; return the keys that name them.

    Args:
        llm, encoder: other sizes of the language model, and of the recognizer's Conformer.
    """
    codec = nemo_codec_config(samples_per_frame=1280)
    codec["audio_encoder"]["down_sample_rates"] = [8, 160]
    codec["audio_decoder"]["up_sample_rates"] = [160, 8]
    return {
        "pretrained_llm": str(save_llm(folder / "llm", **(llm or {}))),
        "pretrained_asr": str(_save_recognizer(folder / "asr.nemo", **(encoder or {}))),
        "pretrained_audio_codec": str(save_nemo_codec(folder / "codec.nemo", codec)),
    }


def save_llm(path: Path, **changes: int) -> Path:
    """A LlamaForCausalLM of two layers, unless changed, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    letters = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(path)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    # One more for the placeholder of audio, and an even number for two shards.
    tokens = {"vocab_size": len(letters) + 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**sizes | {"num_key_value_heads": 4} | tokens | changes)).save_pretrained(path)
    return path


def _save_recognizer(path: Path, **changes: int) -> Path:
    """An EncDecCTCModel with a Conformer of one layer, unless changed, which makes a frame from 80 ms."""
    from nemo.collections.asr.models import EncDecCTCModel
    from omegaconf import OmegaConf

    striding = {"subsampling": "dw_striding", "subsampling_factor": 8, "subsampling_conv_channels": 8}
    encoder = _conformer(feat_in=16, **striding, **changes)
    config = {
        "sample_rate": 16000,
        "preprocessor": {"_target_": f"{ASR}.AudioToMelSpectrogramPreprocessor", "features": 16, "sample_rate": 16000},
        "encoder": encoder,
        "decoder": {
            "_target_": f"{ASR}.ConvASRDecoder",
            "feat_in": encoder["d_model"],
            "num_classes": 3,
            "vocabulary": ["a", "b", "c"],
        },
    }
    EncDecCTCModel(cfg=OmegaConf.create(config)).save_to(str(path))
    return path


def _conformer(**changes: Any) -> dict[str, Any]:
    values = {"_target_": f"{ASR}.ConformerEncoder", "n_layers": 1, "d_model": HIDDEN, "n_heads": 2, "feat_out": -1}
    # Statistics of batches differ between ranks.
    return values | {"conv_kernel_size": 5, "conv_norm_type": "layer_norm", "ff_expansion_factor": 2} | changes


def model_settings(models: dict[str, str], **encoder: int) -> dict[str, Any]:
    """The section ``model`` of both recipes; keys of the other one are ignored.

    Args:
        encoder: other sizes of the recognizer's Conformer, which the adapter gets as well.
    """
    return models | {
        "pretrained_weights": True,
        "freeze_params": [r"^audio_codec\..+$"],
        "prompt_format": "llama2",
        "audio_locator_tag": PLACEHOLDER,
        "audio_loss_weight": 4,
        "text_loss_weight": 3,
        "perception": {
            "target": "nemo.collections.speechlm2.modules.perception.AudioPerceptionModule",
            "modality_adapter": _conformer(feat_in=encoder.get("d_model", HIDDEN), subsampling_factor=1, **encoder),
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 3e-3},
    }


def train(kind: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train like NeMo's salm_train.py and s2s_duplex_train.py; return the result of each step."""
    from lightning.pytorch import Callback, Trainer
    from nemo.collections.speechlm2 import SALM, DataModule, DuplexS2SDataset, DuplexS2SModel, SALMDataset
    from nemo.utils.trainer_utils import resolve_trainer_cfg
    from omegaconf import OmegaConf

    steps = []

    class Steps(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            examples = batch["conversations"] if kind == "salm" else batch["target_texts"]
            steps.append({"loss": outputs["loss"].item(), "examples": [getattr(e, "id", e) for e in examples]})

    torch.manual_seed(0)
    cfg = OmegaConf.create(settings)
    trainer = Trainer(**resolve_trainer_cfg(cfg.trainer), callbacks=[Steps()], default_root_dir=folder)
    with trainer.init_module():
        model = (SALM if kind == "salm" else DuplexS2SModel)(OmegaConf.to_container(cfg.model))
    if kind == "salm":
        dataset = SALMDataset(model.tokenizer)
    else:
        dataset = DuplexS2SDataset(model.tokenizer, FRAME, 16000, 16000, ["user"], ["agent", "assistant"])
    trainer.fit(model, DataModule(cfg.data, model.tokenizer, dataset))
    sharded = sorted({type(p).__name__ for p in model.llm.parameters()})
    return {"steps": steps, "sharded": sharded}


def train_all(folder: Path) -> None:
    """Run the trainings of ``settings.json``, one after the other, and write down what this rank found.

    Their names are ``salm`` or ``duplex``, with anything behind a hyphen.
    """
    torch.distributed.init_process_group("gloo")
    import sharmill.training.nemo.input_type
    import sharmill.training.nemo.tensor_parallel  # noqa: F401

    found = {}
    for name, settings in json.loads((folder / "settings.json").read_text()).items():
        try:
            found[name] = train(name.partition("-")[0], settings, folder)
        except Exception as error:  # noqa: BLE001 - a test looks at it
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        torch.distributed.barrier()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def write_conversations(folder: Path, number: int) -> Path:
    """Write conversations of two sides and two turns, and the manifest that examples/conversations.py reads."""
    conversations = []
    for n in range(number):
        for side, seed in (("user", n), ("agent", 50 + n)):
            put(folder / f"{side}{n}.wav", voice(2 + 0.1 * n, seed=seed))
        turns = [
            {"role": "user", "start": 0.0, "duration": 0.8, "text": f"question {n}"},
            {"role": "assistant", "start": 1.0, "duration": 0.9, "text": f"answer {n}"},
        ]
        audio = {f"{side}_audio_filepath": f"{side}{n}.wav" for side in ("user", "agent")}
        conversations.append({"id": f"c{n}", "turns": turns} | audio)
    return write_lines(folder / "conversations.jsonl", conversations)


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
