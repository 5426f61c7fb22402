"""Trainings of NeMo's speech language models with its own classes, tiny models for them, and conversations."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from support.models import ASR, nemo_codec_config, save_nemo_codec
from support.shar import put, voice

PLACEHOLDER = "<|audioplaceholder|>"
# An encoder's frame, and the codec's: 1280 samples at 16 kHz.
FRAME = 0.08
HIDDEN = 32


def save_models(folder: Path) -> dict[str, str]:
    """Write a language model with its tokenizer, a recognizer and a codec; return the keys that name them."""
    codec = nemo_codec_config(samples_per_frame=1280)
    codec["audio_encoder"]["down_sample_rates"] = [8, 160]
    codec["audio_decoder"]["up_sample_rates"] = [160, 8]
    return {
        "pretrained_llm": str(_save_llm(folder / "llm")),
        "pretrained_asr": str(_save_recognizer(folder / "asr.nemo")),
        "pretrained_audio_codec": str(save_nemo_codec(folder / "codec.nemo", codec)),
    }


def _save_llm(path: Path) -> Path:
    """A LlamaForCausalLM of two layers, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    letters = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(path)
    config = LlamaConfig(
        # One more for the placeholder of audio, and an even number for two shards.
        vocab_size=len(letters) + 4, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def _save_recognizer(path: Path) -> Path:
    """An EncDecCTCModel with a Conformer of one layer, which makes a frame from 80 ms."""
    from nemo.collections.asr.models import EncDecCTCModel
    from omegaconf import OmegaConf

    config = {
        "preprocessor": {"_target_": f"{ASR}.AudioToMelSpectrogramPreprocessor", "features": 16, "sample_rate": 16000},
        "encoder": _conformer(feat_in=16, subsampling="dw_striding", subsampling_factor=8, subsampling_conv_channels=8),
        "decoder": {
            "_target_": f"{ASR}.ConvASRDecoder",
            "feat_in": HIDDEN,
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


def model_settings(models: dict[str, str]) -> dict[str, Any]:
    """The section ``model`` of both recipes; keys of the other one are ignored."""
    return models | {
        "pretrained_weights": True,
        "freeze_params": [r"^audio_codec\..+$"],
        "prompt_format": "llama2",
        "audio_locator_tag": PLACEHOLDER,
        "audio_loss_weight": 4,
        "text_loss_weight": 3,
        "perception": {
            "target": "nemo.collections.speechlm2.modules.perception.AudioPerceptionModule",
            "modality_adapter": _conformer(feat_in=HIDDEN, subsampling_factor=1),
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 3e-3},
    }


def train(kind: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train as NeMo's salm_train.py and s2s_duplex_train.py do; return what each step gave."""
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
    import sharmill.training.nemo.input_type  # noqa: F401

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
    lines = []
    for n in range(number):
        for side, seed in (("user", n), ("agent", 50 + n)):
            put(folder / f"{side}{n}.wav", voice(2 + 0.1 * n, seed=seed))
        turns = [
            {"role": "user", "start": 0.0, "duration": 0.8, "text": f"question {n}"},
            {"role": "assistant", "start": 1.0, "duration": 0.9, "text": f"answer {n}"},
        ]
        audio = {f"{side}_audio_filepath": f"{side}{n}.wav" for side in ("user", "agent")}
        lines.append(json.dumps({"id": f"c{n}", "turns": turns} | audio) + "\n")
    manifest = folder / "conversations.jsonl"
    manifest.write_text("".join(lines))
    return manifest
