"""Codes turned into audio, by every backend that can."""

from __future__ import annotations

import tarfile

import pytest
import torch
from support.errors import raises
from support.models import make_audio

from sharmill.errors import ConfigError
from sharmill.models import DecodingCodec, load_codec
from sharmill.models.nemo_checkpoint import quiet_nemo

KINDS = {
    "nemo_codec": "nemo",
    "nemo_codec_noncausal": "nemo",
    "encodec": "transformers",
    "mimi": "transformers",
    "dac": "transformers",
}


@pytest.fixture(scope="module")
def codecs(checkpoints):
    return {kind: load_codec(f"{backend}:{checkpoints[kind]}") for kind, backend in KINDS.items()}


@pytest.fixture(params=KINDS)
def codec(request, codecs):
    return codecs[request.param]


def encode(codec, *frames):
    """Codes of as many frames for each item, and the numbers of frames."""
    codes = codec.encode(*make_audio([number * codec.samples_per_frame for number in frames]))
    return codes, torch.tensor(frames)


def test_it_says_that_it_decodes(codec):
    assert isinstance(codec, DecodingCodec)
    assert codec.decoded_sampling_rate == 16000


@pytest.mark.parametrize("frames", [1, 2, 17, 50])
def test_the_audio_lasts_as_long_as_the_frames(codec, frames):
    audio = codec.decode(*encode(codec, frames))
    assert audio.shape == (1, frames * codec.samples_per_frame)
    assert audio.dtype == torch.float32
    assert audio.isfinite().all()
    assert audio.abs().max() > 0


def test_an_item_does_not_depend_on_its_batch(codec):
    codes, num_frames = encode(codec, 40, 3, 0, 25)
    together = codec.decode(codes, num_frames)
    for row, (item, length) in enumerate(zip(codes, num_frames.tolist(), strict=True)):
        alone = codec.decode(item[None, :, :length], torch.tensor([length]))[0]
        assert torch.equal(alone, together[row, : len(alone)])
        assert together[row, len(alone) :].eq(0).all()


@pytest.mark.parametrize("kind", ["nemo_codec", "nemo_codec_noncausal"])
def test_nemo_audio_is_that_of_the_model(codecs, checkpoints, kind):
    from nemo.collections.tts.models import AudioCodecModel

    with quiet_nemo():
        model = AudioCodecModel.restore_from(str(checkpoints[kind]), map_location="cpu").eval()
    codes, num_frames = encode(codecs[kind], 40)
    with torch.inference_mode():
        expected, _ = model.decode(tokens=codes, tokens_len=num_frames)
    assert torch.allclose(codecs[kind].decode(codes, num_frames), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["encodec", "mimi", "dac"])
def test_transformers_audio_is_that_of_the_model(codecs, checkpoints, kind):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoints[kind]).eval()
    codes, num_frames = encode(codecs[kind], 40)
    with torch.inference_mode():
        if kind == "encodec":
            expected = model.decode(codes[None], [None]).audio_values
        else:
            expected = model.decode(audio_codes=codes).audio_values
    expected = expected.reshape(1, -1)
    assert torch.allclose(codecs[kind].decode(codes, num_frames)[:, : expected.shape[1]], expected, atol=1e-6)


def test_codes_outside_the_codebook_are_refused(codec):
    codes, num_frames = encode(codec, 20)
    for wrong in (-1, codec.codebook_size):
        changed = codes.clone()
        changed[0, 1, 3] = wrong
        with pytest.raises(ValueError, match="outside"):
            codec.decode(changed, num_frames)


@pytest.mark.parametrize(
    ("codes", "num_frames"),
    [((1, 2, 5), [5]), ((3, 5), [5]), ((1, 3, 5), [6]), ((1, 3, 5), [-1]), ((1, 3, 5), [5, 5])],
)
def test_shapes_that_do_not_fit_are_refused(codecs, codes, num_frames):
    with pytest.raises(ValueError, match="num_frames"):
        codecs["nemo_codec"].decode(torch.zeros(codes, dtype=torch.int64), torch.tensor(num_frames))


def test_a_checkpoint_without_its_decoder_encodes_and_does_not_decode(codecs, checkpoints, tmp_path):
    unpacked, path = tmp_path / "unpacked", tmp_path / "codec.nemo"
    with tarfile.open(checkpoints["nemo_codec"]) as archive:
        archive.extractall(unpacked, filter="data")
    weights = torch.load(unpacked / "model_weights.ckpt", weights_only=True)
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("audio_decoder.")}
    torch.save(kept, unpacked / "model_weights.ckpt")
    with tarfile.open(path, "w") as archive:
        archive.add(unpacked, ".")
    codec = load_codec(f"nemo:{path}")
    codes, num_frames = encode(codec, 20)
    assert torch.equal(codes, encode(codecs["nemo_codec"], 20)[0])
    assert codec.decoded_sampling_rate is None
    with raises(ConfigError, "no_decoder", str(path)):
        codec.decode(codes, num_frames)
