"""NeMo's Magpie-TTS recipes on our data by themselves: its dataset classes load them, and its model trains on them.

The configuration of docs/nemo-magpie.md, at a tiny size; sharmill has no part in what reads or trains.
"""

from __future__ import annotations

import math
import sys

import pytest
import torch
from omegaconf import OmegaConf
from support.models import nemo_codec_config, save_nemo_codec
from support.shar import Project, run_codec, voice

from sharmill.export.run import export_dataset
from sharmill.models.nemo_checkpoint import quiet_nemo
from sharmill.shar import open_shar

pytestmark = pytest.mark.slow

CHARS = "nemo.collections.common.tokenizers.text_to_speech.tts_tokenizers.EnglishCharsTokenizer"
STEPS = 20


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    """An AudioCodecModel: 3 codebooks of 60, 50 frames of 320 samples per second."""
    config = nemo_codec_config(samples_per_frame=320)
    config["audio_encoder"]["down_sample_rates"] = [8, 40]
    config["audio_decoder"]["up_sample_rates"] = [40, 8]
    with quiet_nemo():
        return save_nemo_codec(tmp_path_factory.mktemp("codec") / "codec.nemo", config)


@pytest.fixture(scope="module")
def speech(tmp_path_factory, codec):
    """Eight utterances of 1 s to 1.7 s in two shards; the tag of one of them has a language with a region."""
    project = Project(tmp_path_factory.mktemp("magpie"))
    for number in range(8):
        project.add(f"{number}.flac", voice(1 + 0.1 * number, seed=number), text="hello world"[: 4 + number])
    project.records[3]["speaker"] = "| Language:en-US Dataset:Tests Speaker:anna |"
    config = project.write(write={"shard_size": 4, "order": "manifest"}, match={"min_duration": 0.0})
    run_codec(config, "tiny", f"nemo:{codec}")
    return project


def shar_path(dataset):
    """The value that docs/nemo-magpie.md gives the key ``shar_path``."""
    return {
        "cuts": f"{dataset}/cuts/cuts.{{000000..000001}}.jsonl.gz",
        "target_codes": f"{dataset}/codes_tiny/target_codes/codes.{{000000..000001}}.tar",
        "context_codes": f"{dataset}/codes_tiny/context_codes/codes.{{000000..000001}}.tar",
    }


def lhotse_settings(dataset):
    entry = {"type": "lhotse_shar", "shar_path": shar_path(dataset), "weight": 1.0}
    return {
        "use_lhotse": True,
        "volume_norm": True,
        "input_cfg": [entry | {"tags": {"tokenizer_names": ["letters"]}}],
        "batch_size": 4,
        "shuffle": True,
        "shard_seed": "trng",
        "num_workers": 0,
        "min_context_speaker_similarity": 0.6,
        "max_cer": 0.03,
    }


def manifest_settings(speech, out):
    exported = export_dataset(speech.dataset, "nemo_codes", out)
    meta = {"manifest_path": str(exported.manifest), "audio_dir": "/", "tokenizer_names": ["letters"]}
    return {
        "datasets": {
            "_target_": "nemo.collections.tts.data.text_to_speech_dataset.MagpieTTSDataset",
            "dataset_meta": {"speech": meta},
            "min_duration": 0.2,
            "max_duration": 20.0,
        },
        "dataloader_params": {"batch_size": 4, "num_workers": 0, "drop_last": True},
    }


def layers(**changes):
    values = {"n_layers": 2, "d_model": 32, "d_ffn": 64, "sa_n_heads": 2, "kernel_size": 1, "p_dropout": 0.0}
    values |= {"p_dropout_out": 0.0, "has_xattn": False, "is_causal": True, "apply_norm_out": True}
    return values | {"max_length_causal_mask": 512, "use_learnable_pos_emb": True} | changes


def model_settings(codec, train_ds):
    return {
        "model_type": "decoder_context_tts",
        "use_text_conditioning_encoder": False,
        "context_duration_min": 0.2,
        "context_duration_max": 0.4,
        "load_cached_codes_if_available": True,
        "prior_scaling_factor": 0.5,
        "prior_end_step": 12000,
        "prior_scaledown_start_step": 8000,
        "alignment_loss_scale": 0.002,
        "embedding_dim": 32,
        "codecmodel_path": str(codec),
        "local_transformer_type": "autoregressive",
        "local_transformer_n_layers": 1,
        "local_transformer_hidden_dim": 16,
        "text_tokenizers": {"letters": {"_target_": CHARS}},
        "train_ds": train_ds,
        "encoder": layers(),
        "decoder": layers(has_xattn=True, xa_d_memory=32, xa_n_heads=1, xa_d_head=16, apply_norm_to_cond=True),
        "optim": {"_target_": "torch.optim.AdamW", "lr": 3e-3},
    }


def train(codec, train_ds, folder):
    """Train NeMo's model with Lightning, and return the loss and the batch of each step."""
    from lightning.pytorch import Callback, Trainer
    from nemo.collections.tts.models import MagpieTTSModel

    steps = []

    class Steps(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            steps.append((outputs["loss"].item(), batch))

    with quiet_nemo():
        torch.manual_seed(0)
        trainer = Trainer(
            max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, use_distributed_sampler=False, callbacks=[Steps()], default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(MagpieTTSModel(OmegaConf.create(model_settings(codec, train_ds)), trainer))
    return steps


def check(steps, dataset):
    """The loss falls, and every batch has the codes that the dataset holds for its texts."""
    losses = [loss for loss, _ in steps]
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses))
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    stored = {cut.supervisions[0].text: cut.load_target_codes() for cut in open_shar(dataset, ["target_codes"])}
    seen = set()
    for _, batch in steps:
        for text, codes, length in zip(
            batch["raw_texts"], batch["audio_codes"], batch["audio_codes_lens"], strict=True
        ):
            assert torch.equal(codes[:, :length], torch.from_numpy(stored[text]).int())
            seen.add(text)
    assert seen == set(stored)


def test_from_shards_without_sharmill(speech, codec, tmp_path, monkeypatch):
    settings = lhotse_settings(speech.dataset)
    with monkeypatch.context() as without:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sharmill"]:
            without.setitem(sys.modules, name, None)
        steps = train(codec, settings, tmp_path)
    check(steps, speech.dataset)


def test_from_a_manifest_with_files_of_codes(speech, codec, tmp_path):
    check(train(codec, manifest_settings(speech, tmp_path / "out"), tmp_path), speech.dataset)
