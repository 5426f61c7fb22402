"""Tests of NeMo's Magpie-TTS on sharmill's datasets: its dataset class in sharmill's loader, and its own recipes.

The recipes are those of docs/nemo.md at a tiny size; reading and training there is done by NeMo alone.
"""

import math
import sys

import pytest
import torch
from omegaconf import OmegaConf
from support.models import nemo_codec_config, save_nemo_codec
from support.project import Project, run_codec, voice
from support.training import AsIs, number, take

from sharmill.export.run import export_dataset
from sharmill.models.nemo_models import quiet_nemo
from sharmill.shar import open_shar
from sharmill.training import get_dataloader

CHARS = "nemo.collections.common.tokenizers.text_to_speech.tts_tokenizers.EnglishCharsTokenizer"


def magpie(**changes):
    from nemo.collections.tts.data.text_to_speech_dataset_lhotse import MagpieTTSLhotseDataset

    settings = {
        "sample_rate": 16000,
        "codec_model_samples_per_frame": 320,
        "num_audio_codebooks": 3,
        "volume_norm": False,
        "load_16khz_audio": False,
        "context_duration_min": 0.2,
        "context_duration_max": 0.4,
        "tokenizer_config": OmegaConf.create({"letters": {"_target_": CHARS}}),
    }
    return MagpieTTSLhotseDataset(**settings | changes)


def load(entry, dataset, **settings):
    entry = entry | {"tags": {"tokenizer_names": ["letters"]}}
    cfg = {"input_cfg": [entry], "force_finite": True, "batch_size": 5, "sample_rate": 16000} | settings
    return take(get_dataloader(cfg, 0, 1, dataset=dataset))


def find(codes, window):
    """Return the position of a window of codes (codebooks, frames) within codes."""
    length = window.shape[1]
    return [i for i in range(codes.shape[1] - length + 1) if torch.equal(codes[:, i : i + length], window)]


def test_codes_and_text(corpora):
    dataset = magpie()
    batch = load(corpora.entry("large"), dataset)[2]
    cuts = load(corpora.entry("large"), AsIs())[2]
    assert [number(cut) for cut in cuts] == [10, 11, 12, 13, 14]
    assert batch["audio_codes"].shape == (5, 3, 95)
    assert batch["audio_codes_lens"].tolist() == [75, 80, 85, 90, 95]
    for row, cut in enumerate(cuts):
        target = torch.from_numpy(cut.load_target_codes()).int()
        assert torch.equal(batch["audio_codes"][row, :, : target.shape[1]], target)
        assert not batch["audio_codes"][row, :, target.shape[1] :].any()
        length = batch["context_audio_codes_lens"][row]
        assert 10 <= length <= 20
        assert find(torch.from_numpy(cut.load_context_codes()).int(), batch["context_audio_codes"][row, :, :length])
        letters = dataset.text_tokenizer.encode(cut.supervisions[0].text, tokenizer_name="letters")
        assert len(letters) == number(cut) % 6 + 1
        assert batch["text"][row, : batch["text_lens"][row]].tolist() == [*letters, dataset.eos_id]
    assert (batch["dataset_names"], batch["languages"]) == (["Tests"] * 5, ["en"] * 5)


def test_audio_where_there_are_no_codes(corpora):
    entry = corpora.entry("large") | {"fields": ["target_audio", "context_audio"]}
    batch = load(entry, magpie(load_16khz_audio=True))[0]
    cuts = load(entry, AsIs())[0]
    assert "audio_codes" not in batch
    for row, cut in enumerate(cuts):
        samples = torch.from_numpy(cut.load_audio()[0])
        assert torch.equal(batch["audio"][row, : len(samples)], samples)
        # NeMo pads to whole frames, and adds a frame if no padding is needed.
        assert batch["audio_lens"][row] == (len(samples) // 320 + 1) * 320
        assert batch["context_audio_lens"][row] % 320 == 0
        assert 3200 <= batch["context_audio_lens"][row] <= 6400
        assert 3200 <= batch["audio_lens_16khz"][row] <= 6400


def test_languages_with_a_region_are_written_as_nemo_reads_them(corpora):
    """NeMo 3.0.0 refuses the manifest's Language:de-DE in a tag; the language itself stays unchanged."""
    batch = load(corpora.entry("small"), magpie())[0]
    assert (batch["dataset_names"], batch["languages"]) == (["Tests"] * 5, ["de-DE"] * 5)
    (cut, *_) = load(corpora.entry("small"), AsIs())[0]
    assert cut.supervisions[0].speaker == "| Language:de_DE Dataset:Tests Speaker:bert |"
    assert cut.supervisions[0].custom["original_speaker"] == "| Language:de-DE Dataset:Tests Speaker:bert |"


STEPS = 20


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    """An AudioCodecModel with 3 codebooks of 60 codes, and 50 frames of 320 samples per second."""
    config = nemo_codec_config(samples_per_frame=320)
    config["audio_encoder"]["down_sample_rates"] = [8, 40]
    config["audio_decoder"]["up_sample_rates"] = [40, 8]
    with quiet_nemo():
        return save_nemo_codec(tmp_path_factory.mktemp("codec") / "codec.nemo", config)


@pytest.fixture(scope="module")
def speech(tmp_path_factory, codec):
    """Eight utterances of 1 s to 1.7 s in two shards; one speaker tag has a language with a region."""
    project = Project(tmp_path_factory.mktemp("magpie"))
    for n in range(8):
        project.add(f"{n}.flac", voice(1 + 0.1 * n, seed=n), text="hello world"[: 4 + n])
    project.records[3]["speaker"] = "| Language:en-US Dataset:Tests Speaker:anna |"
    config = project.write(write={"shard_size": 4, "order": "manifest"}, match={"min_duration": 0.0})
    run_codec(config, "tiny", f"nemo:{codec}")
    return project


def shar_path(dataset):
    """Return the value of ``shar_path`` as in docs/nemo.md."""
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
    """Train NeMo's model with Lightning; return the loss and the batch of each step."""
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
    """The loss falls, and every batch has the dataset's codes for its texts."""
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


@pytest.mark.slow
def test_from_shards_without_sharmill(speech, codec, tmp_path, monkeypatch):
    settings = lhotse_settings(speech.dataset)
    with monkeypatch.context() as without:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sharmill"]:
            without.setitem(sys.modules, name, None)
        steps = train(codec, settings, tmp_path)
    check(steps, speech.dataset)


@pytest.mark.slow
def test_from_a_manifest_with_files_of_codes(speech, codec, tmp_path):
    check(train(codec, manifest_settings(speech, tmp_path / "out"), tmp_path), speech.dataset)
