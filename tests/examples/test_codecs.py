"""The codecs in examples/codecs/, on small models of the real classes."""

from __future__ import annotations

import logging
import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import example_codecs
from support.errors import raises
from support.example_codecs import save_s3
from support.manifests import speaker_tag, write_manifest
from support.models import make_audio
from support.paths import REPOSITORY
from support.pipelines import write_config
from support.shar import put, voice

from sharmill.cli.main import main
from sharmill.errors import ConfigError, UnitFailed
from sharmill.models import load_codec
from sharmill.shar import open_shar

FOLDER = REPOSITORY / "examples" / "codecs"
# Package, codec, samples per frame, codebooks, codebook size, rate of decoded audio.
CODECS = {
    "snac": ("snac", example_codecs.save_snac, 128, 7, 64, None),
    "xcodec2": ("transformers", example_codecs.save_xcodec2, 320, 1, 4**8, 16000),
    "s3_v1": ("s3tokenizer", lambda folder: save_s3("speech_tokenizer_v1"), 320, 1, 4096, None),
    "s3_v1_25hz": ("s3tokenizer", lambda folder: save_s3("speech_tokenizer_v1_25hz"), 640, 1, 4096, None),
    "s3_v2_25hz": ("s3tokenizer", lambda folder: save_s3("speech_tokenizer_v2_25hz"), 640, 1, 3**8, None),
    "neucodec": ("transformers", example_codecs.save_neucodec, 320, 1, 4**8, 24000),
}


@pytest.fixture(autouse=True)
def codec_folder(tmp_path, monkeypatch):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def need(package: str) -> None:
    pytest.importorskip(package, reason=f"the package {package} is not installed: pip install 'sharmill[test]'")


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_has_its_facts_and_codes_that_do_not_depend_on_the_batch(tmp_path, name):
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
        # Sums of batches have other last bits, by which few codes may become others.
        assert float((codes[item, :, :num_frames] == alone).float().mean()) > 0.95
    assert len(codes[0].unique()) > 5
    if decoded_rate is not None:
        num_frames = -(-num_samples // samples_per_frame)
        assert codec.decode(codes, num_frames).shape == (4, 50 * samples_per_frame * decoded_rate // 16000)


@pytest.mark.parametrize("window", [None, 32])
def test_snacs_levels_become_rows_in_the_order_of_time(tmp_path, window):
    need("snac")
    codec = load_codec(example_codecs.save_snac(tmp_path / "snac", attn_window_size=window))
    assert (codec.samples_per_frame, codec.num_codebooks, codec.codebook_size) == (4 * 32, 1 + 2 + 4, 64)
    audio, num_samples = make_audio([16000, 16000, 9001])
    codes = codec.encode(audio, num_samples)
    assert codes.shape == (3, 7, 125)
    from snac import SNAC

    with torch.inference_mode():
        levels = SNAC.from_pretrained(str(tmp_path / "snac")).eval().encode(audio[:2, None])
    for row, (level, start, step) in enumerate([(0, 0, 1), (1, 0, 2), (1, 1, 2), *((2, n, 4) for n in range(4))]):
        expected = levels[level][:2, start::step][:, :125]
        assert float((codes[:2, row] == expected).float().mean()) > 0.99


@pytest.mark.parametrize(
    ("name", "length"),
    # X-Codec-2 is given what it fills up to 50 frames by itself, NeuCodec what it makes 50 codes of.
    [("xcodec2", 15999), ("xcodec2", 15681), ("neucodec", 16000)],
)
def test_codes_of_x_codec_2_and_neucodec_are_those_of_transformers(tmp_path, name, length):
    need("transformers")
    from transformers import AutoFeatureExtractor, AutoModel

    codec = load_codec(CODECS[name][1](tmp_path / name))
    audio, num_samples = make_audio([length])
    model, extractor = AutoModel.from_pretrained(tmp_path / name), AutoFeatureExtractor.from_pretrained(tmp_path / name)
    features = extractor(audio[0], sampling_rate=16000, return_tensors="pt")
    with torch.inference_mode():
        expected = model.eval().encode(**features).audio_codes.long()
    torch.testing.assert_close(codec.encode(audio, num_samples), expected)


def test_weights_that_an_x_codec_2_lacks_are_named(tmp_path):
    need("transformers")
    name = example_codecs.save_xcodec2(tmp_path / "xcodec2")
    weights = load_file(tmp_path / "xcodec2/model.safetensors")
    del weights["fc_encoder.bias"]
    save_file(weights, tmp_path / "xcodec2/model.safetensors", metadata={"format": "pt"})
    with raises(ConfigError, "bad_model", "lacks 1 weights of Xcodec2Model", "fc_encoder.bias"):
        load_codec(name)


@pytest.mark.parametrize("name", ["speech_tokenizer_v1", "speech_tokenizer_v1_25hz", "speech_tokenizer_v2_25hz"])
def test_an_s3_tokenizer_is_the_one_that_was_saved_and_has_its_codes(name):
    need("s3tokenizer")
    import s3tokenizer
    from support import small_s3

    model = small_s3.save(name)
    audio, num_samples = make_audio([16000])
    codes = load_codec(f"python:support.small_s3:S3Codec:{name}").encode(audio, num_samples)
    mel = s3tokenizer.log_mel_spectrogram(audio[0])
    expected, num_codes = model(mel[None], torch.tensor([mel.shape[1]]))
    assert int(num_codes) == codes.shape[2]
    torch.testing.assert_close(codes[:, 0], expected.long())


def test_a_model_that_is_not_there_is_named(tmp_path, monkeypatch):
    need("transformers")
    with raises(ConfigError, "bad_model", f"cannot load {tmp_path}/none"):
        load_codec(f"python:xcodec2_codec:NeuCodec:{tmp_path}/none")
    need("s3tokenizer")
    import s3tokenizer

    monkeypatch.setitem(s3tokenizer._MODELS, "speech_tokenizer_v1", (tmp_path / "none.onnx").as_uri())
    with raises(ConfigError, "bad_model", "cannot load speech_tokenizer_v1"):
        load_codec("python:s3_codec:S3Codec:speech_tokenizer_v1")


def test_an_s3_tokenizer_refuses_what_the_package_would_read_as_another_model(tmp_path):
    need("s3tokenizer")
    with raises(ConfigError, "unknown_name", "speech_tokenizer_v1_25hz"):
        load_codec(f"python:s3_codec:S3Codec:{tmp_path}/speech_tokenizer_v1_25hz.onnx")


def test_an_s3_tokenizer_refuses_audio_of_which_the_package_would_lose_codes(tmp_path):
    need("s3tokenizer")
    codec = load_codec(save_s3("speech_tokenizer_v2_25hz"))
    audio, num_samples = make_audio([30 * 16000 + 1])
    with raises(UnitFailed, "bad_config_value", "takes at most 30 s", "prepare.max_duration=30"):
        codec.encode(audio, num_samples)


@pytest.mark.slow
def test_all_go_through_a_run_and_are_read_back(tmp_path):
    for package, *_ in CODECS.values():
        need(package)
    seconds = [0.5, 0.61, 0.7, 0.5]
    for number, duration in enumerate(seconds):
        put(tmp_path / f"audio/{number}.flac", voice(duration, pitch=120 + 30 * number, seed=number))
    records = [
        {"audio_filepath": f"{number}.flac", "duration": duration, "text": "a", "speaker": speaker_tag("s")}
        for number, duration in enumerate(seconds)
    ]
    manifest = write_manifest(tmp_path / "manifest.json", records)
    names = ["snac", "xcodec2", "neucodec", "s3_v2_25hz"]
    models = {name: CODECS[name][1](tmp_path / name) for name in names}
    codecs = [{"name": name, "model": model} for name, model in models.items()]
    config = write_config(
        tmp_path, manifest, tmp_path / "audio", tmp_path, match=None, encode={"codecs": codecs}, write={"shard_size": 2}
    )
    with pytest.raises(SystemExit) as end:
        main(["run", str(config)])
    assert end.value.code == 0
    for name, model in models.items():
        codec = load_codec(model)
        for cut in open_shar(tmp_path / "dataset", ["target_audio", "target_codes"], codec=name):
            audio = torch.from_numpy(cut.load_audio())
            expected = codec.encode(audio, torch.tensor([audio.shape[1]]))[0].numpy()
            assert cut.load_target_codes().shape == expected.shape
            assert float((cut.load_target_codes() == expected).mean()) > 0.95
