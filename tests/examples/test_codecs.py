"""The codecs in examples/codecs/, with small models of the real classes."""

import logging
import os
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from support.models import make_audio, save_neucodec, save_snac, save_xcodec2
from support.project import REPOSITORY, raises

from sharmill.errors import ConfigError, UnitFailed
from sharmill.models import load_codec

FOLDER = REPOSITORY / "examples" / "codecs"
S3 = "python:s3_codec:S3Codec"
# Package, codec, samples per frame, codebooks, codebook size, sampling rate of decoded audio.
CODECS = {
    "snac": ("snac", save_snac, 128, 7, 64, None),
    "xcodec2": ("transformers", save_xcodec2, 320, 1, 4**8, 16000),
    "s3_v1": ("s3tokenizer", lambda folder: f"{S3}:speech_tokenizer_v1", 320, 1, 4096, None),
    "s3_v1_25hz": ("s3tokenizer", lambda folder: f"{S3}:speech_tokenizer_v1_25hz", 640, 1, 4096, None),
    "s3_v2_25hz": ("s3tokenizer", lambda folder: f"{S3}:speech_tokenizer_v2_25hz", 640, 1, 3**8, None),
    "neucodec": ("transformers", save_neucodec, 320, 1, 4**8, 24000),
}


@pytest.fixture(autouse=True)
def codec_folder(monkeypatch):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
    with suppress(ImportError):
        monkeypatch.setattr("s3tokenizer.load_model", small_s3)
    yield
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def small_s3(name: str) -> torch.nn.Module:
    """Return a seeded S3 tokenizer with two layers instead of the published model."""
    import s3tokenizer

    model_class = s3tokenizer.S3TokenizerV2 if "v2" in name else s3tokenizer.S3Tokenizer
    published = model_class.__init__.__defaults__[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(name, replace(published, n_audio_state=64, n_audio_head=1, n_audio_layer=2)).eval()
        if model_class is s3tokenizer.S3Tokenizer:
            model.quantizer.codebook.normal_(std=0.1)
    return model


def need(package: str) -> None:
    pytest.importorskip(package, reason=f"the package {package} is not installed: pip install 'sharmill[test]'")


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_has_its_facts_and_codes_independent_of_batches(tmp_path, name):
    package, save, samples_per_frame, num_codebooks, codebook_size, decoded_rate = CODECS[name]
    need(package)
    codec = load_codec(save(tmp_path / name))
    facts = codec.sampling_rate, codec.samples_per_frame, codec.num_codebooks, codec.codebook_size
    assert facts == (16000, samples_per_frame, num_codebooks, codebook_size)
    assert codec.decoded_sampling_rate == decoded_rate
    audio, num_samples = make_audio([16000, 16000, 9001, 1])
    codes = codec.encode(audio, num_samples)
    for item, length in enumerate(num_samples.tolist()):
        alone = codec.encode(audio[item : item + 1, :length], num_samples[item : item + 1])[0]
        num_frames = -(-length // samples_per_frame)
        assert alone.shape == (num_codebooks, num_frames)
        # Sums in batches differ in their last bits, which may change a few codes.
        assert float((codes[item, :, :num_frames] == alone).float().mean()) > 0.95
    assert len(codes[0].unique()) > 5
    if decoded_rate is not None:
        num_frames = -(-num_samples // samples_per_frame)
        assert codec.decode(codes, num_frames).shape == (4, 50 * samples_per_frame * decoded_rate // 16000)


@pytest.mark.parametrize(
    ("name", "length"),
    # X-Codec-2 pads these lengths to 50 frames by itself; NeuCodec makes 50 codes of this one.
    [("xcodec2", 15999), ("xcodec2", 15681), ("neucodec", 16000)],
)
def test_codes_of_x_codec_2_and_neucodec_equal_transformers(tmp_path, name, length):
    need("transformers")
    from transformers import AutoFeatureExtractor, AutoModel

    codec = load_codec(CODECS[name][1](tmp_path / name))
    audio, num_samples = make_audio([length])
    model, extractor = AutoModel.from_pretrained(tmp_path / name), AutoFeatureExtractor.from_pretrained(tmp_path / name)
    features = extractor(audio[0], sampling_rate=16000, return_tensors="pt")
    with torch.inference_mode():
        expected = model.eval().encode(**features).audio_codes.long()
    torch.testing.assert_close(codec.encode(audio, num_samples), expected)


@pytest.mark.parametrize("name", ["speech_tokenizer_v1", "speech_tokenizer_v1_25hz", "speech_tokenizer_v2_25hz"])
def test_codes_of_an_s3_tokenizer_equal_its_package(name):
    need("s3tokenizer")
    import s3tokenizer

    audio, num_samples = make_audio([16000])
    codes = load_codec(f"{S3}:{name}").encode(audio, num_samples)
    mel = s3tokenizer.log_mel_spectrogram(audio[0])
    expected, num_codes = small_s3(name)(mel[None], torch.tensor([mel.shape[1]]))
    assert int(num_codes) == codes.shape[2]
    torch.testing.assert_close(codes[:, 0], expected.long())


def test_an_s3_tokenizer_refuses_files_read_as_another_model(tmp_path):
    need("s3tokenizer")
    with raises(ConfigError, "unknown_name", "speech_tokenizer_v1_25hz"):
        load_codec(f"{S3}:{tmp_path}/speech_tokenizer_v1_25hz.onnx")


def test_an_s3_tokenizer_refuses_audio_that_would_lose_codes(tmp_path):
    need("s3tokenizer")
    codec = load_codec(f"{S3}:speech_tokenizer_v2_25hz")
    audio, num_samples = make_audio([30 * 16000 + 1])
    with raises(UnitFailed, "bad_config_value", "takes at most 30 s", "prepare.max_duration=30"):
        codec.encode(audio, num_samples)
