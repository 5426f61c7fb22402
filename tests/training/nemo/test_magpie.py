"""NeMo's own MagpieTTSLhotseDataset on our datasets."""

from __future__ import annotations

import torch
from omegaconf import OmegaConf
from support.shar import ToyCodec
from support.training import AsIs, flat, number, take

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
    """Return the place of a window of codes (codebooks, frames) in codes."""
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
    assert batch["dataset_names"] == ["Tests"] * 5
    assert batch["languages"] == ["en"] * 5


def test_codes_are_those_of_the_audio(corpora):
    cut = flat(load(corpora.entry("large") | {"fields": None}, AsIs()))[7]
    batch = load(corpora.entry("large"), magpie())[1]
    expected = torch.from_numpy(ToyCodec().codes(cut.load_audio()[0])).int()
    assert torch.equal(batch["audio_codes"][2, :, : expected.shape[1]], expected)


def test_audio_where_there_are_no_codes(corpora):
    entry = corpora.entry("large") | {"fields": ["target_audio", "context_audio"]}
    batch = load(entry, magpie(load_16khz_audio=True))[0]
    cuts = load(entry, AsIs())[0]
    assert "audio_codes" not in batch
    for row, cut in enumerate(cuts):
        samples = torch.from_numpy(cut.load_audio()[0])
        assert torch.equal(batch["audio"][row, : len(samples)], samples)
        # NeMo pads to whole frames, and adds one where there is nothing to pad.
        assert batch["audio_lens"][row] == (len(samples) // 320 + 1) * 320
        assert batch["context_audio_lens"][row] % 320 == 0
        assert 3200 <= batch["context_audio_lens"][row] <= 6400
        assert 3200 <= batch["audio_lens_16khz"][row] <= 6400


def test_in_workers_and_buckets(corpora):
    settings = {"num_workers": 2, "shuffle": True, "bucket_duration_bins": [1.0, 2.0], "batch_duration": 6.0}
    batches = load(corpora.entry("large"), magpie(), batch_size=None, **settings)
    assert sum(len(batch["raw_texts"]) for batch in batches) == 23
    assert sorted(n for batch in batches for n in batch["audio_codes_lens"].tolist()) == [25 + 5 * n for n in range(23)]


def test_languages_with_a_region_are_written_as_nemo_reads_them(corpora):
    """The manifest has Language:de-DE, which NeMo 3.0.0 refuses in a tag; the language itself keeps its form."""
    batch = load(corpora.entry("small"), magpie())[0]
    assert batch["dataset_names"] == ["Tests"] * 5
    assert batch["languages"] == ["de-DE"] * 5
    (cut, *_) = load(corpora.entry("small"), AsIs())[0]
    assert cut.supervisions[0].speaker == "| Language:de_DE Dataset:Tests Speaker:bert |"
    assert cut.supervisions[0].custom["original_speaker"] == "| Language:de-DE Dataset:Tests Speaker:bert |"
