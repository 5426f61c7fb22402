"""Codecs loaded from real checkpoints, compared with the original models."""

import tarfile

import pytest
import torch
from safetensors import torch as safetensors
from support import models
from support.project import raises

from sharmill.errors import ConfigError, FatalError, UnitFailed
from sharmill.models import DecodingCodec, load_codec
from sharmill.models.nemo_models import quiet_nemo

KINDS = {
    "nemo_codec": "nemo",
    "nemo_codec_noncausal": "nemo",
    "encodec": "transformers",
    "mimi": "transformers",
    "dac": "transformers",
}
# The last bit, which depends on the shape of a batch, decides a tie between two codes.
MIN_AGREEMENT = 0.998


@pytest.fixture(scope="module")
def codecs(checkpoints):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loaded = {kind: load_codec(f"{backend}:{checkpoints[kind]}") for kind, backend in KINDS.items()}
    assert torch.equal(torch.get_rng_state(), before)
    return loaded | {"builtin": load_codec("builtin")}


@pytest.fixture(params=[*KINDS, "builtin"])
def codec(request, codecs):
    return codecs[request.param]


def agreement(codec, audio, num_samples) -> float:
    """Return the share of codes that are equal for items encoded together and alone."""
    together = codec.encode(audio, num_samples)
    same = total = 0
    for item, length in enumerate(num_samples):
        alone = codec.encode(audio[item : item + 1, :length], num_samples[item : item + 1])[0]
        same += int((alone == together[item, :, : alone.shape[1]]).sum())
        total += alone.numel()
    return same / total


def test_codes_do_not_depend_on_batch_neighbours(codec):
    frame = codec.samples_per_frame
    lengths = [
        1,
        frame // 2,
        frame,
        2 * frame,
        3 * frame + 1,
        4 * frame,
        6 * frame,
        7 * frame,
        9 * frame - 1,
        200 * frame,
    ]
    audio, num_samples = models.make_audio([lengths[i] for i in (4, 9, 0, 7, 2, 5, 1, 8, 3, 6)])
    share = agreement(codec, audio, num_samples)
    print(f"{codec.spec.name}: {share:.4%} of the codes agree")
    assert share >= MIN_AGREEMENT


@pytest.mark.parametrize("kind", ["nemo_codec", "nemo_codec_noncausal"])
def test_nemo_codes_and_audio_equal_those_of_the_model(codecs, checkpoints, kind):
    from nemo.collections.tts.models import AudioCodecModel

    with quiet_nemo():
        model = AudioCodecModel.restore_from(str(checkpoints[kind]), map_location="cpu").eval()
    for length in (32 * 40 - 1, 32 * 40, 32 * 40 + 1):
        audio, num_samples = models.make_audio([length])
        with torch.inference_mode():
            expected, _ = model.encode(audio=audio, audio_len=num_samples)
        assert torch.equal(codecs[kind].encode(audio, num_samples), expected.long())
    codes, num_frames = encode(codecs[kind], 40)
    with torch.inference_mode():
        expected, _ = model.decode(tokens=codes, tokens_len=num_frames)
    assert torch.allclose(codecs[kind].decode(codes, num_frames), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["encodec", "mimi", "dac"])
def test_transformers_codes_and_audio_equal_the_model(codecs, checkpoints, kind):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoints[kind]).eval()
    audio, num_samples = models.make_audio([64 * 40])
    with torch.inference_mode():
        if kind == "encodec":
            codes = model.encode(audio[:, None], bandwidth=24.0).audio_codes[0]
            expected = model.decode(codes[None], [None]).audio_values.reshape(1, -1)
        else:
            codes = model.encode(audio[:, None]).audio_codes
            expected = model.decode(audio_codes=codes).audio_values.reshape(1, -1)
    assert torch.equal(codecs[kind].encode(audio, num_samples), codes)
    decoded = codecs[kind].decode(codes, torch.tensor([codes.shape[2]]))
    assert torch.allclose(decoded[:, : expected.shape[1]], expected, atol=1e-6)


def test_indices_outside_the_codebook_fail_the_unit(checkpoints):
    codec = load_codec(f"nemo:{checkpoints['nemo_codec']}")
    codec.codebook_size = 5
    with raises(UnitFailed, "bad_codes", "5"):
        codec.encode(*models.make_audio([3200]))


def test_a_wrong_number_of_frames_is_fatal(checkpoints):
    codec = load_codec(f"nemo:{checkpoints['nemo_codec']}")
    codec.samples_per_frame = 64
    with raises(FatalError, "bad_codes", "(1, 3, 20)", "(1, 3, 10)"):
        codec.encode(*models.make_audio([640]))


@pytest.mark.parametrize("changes", [{"use_causal_conv": False}, {"normalize": True}, {"norm_type": "time_group_norm"}])
def test_an_encodec_that_sees_padding_needs_equal_lengths(tmp_path, changes):
    codec = load_codec(f"transformers:{models.save_encodec(tmp_path / 'encodec', **changes)}")
    assert codec.equal_lengths_only
    assert agreement(codec, *models.make_audio([32, 70, 96, 400, 3200])) >= MIN_AGREEMENT


def test_a_codec_keeps_the_contract(codec):
    """The number of frames is rounded up, codes end with an item and ignore its padding, and they vary."""
    frame = codec.samples_per_frame
    assert isinstance(codec, DecodingCodec)
    assert (codec.sampling_rate, codec.decoded_sampling_rate, codec.trained) == (16000, 16000, True)
    lengths = [frames * frame + more for frames in (1, 2, 3, 8, 100) for more in (-1, 0, 1)]
    audio, num_samples = models.make_audio([*lengths, 0])
    codes = codec.encode(audio, num_samples)
    assert (codes.dtype, codes.shape) == (torch.int64, (len(audio), codec.num_codebooks, 101))
    for item, row, length in zip(codes, audio, num_samples.tolist(), strict=True):
        num_frames = -(-length // frame)
        assert item[:, num_frames:].eq(0).all()
        row[length:] = 0.7
    assert torch.equal(codec.encode(audio, num_samples), codes)
    assert min(row.unique().numel() for row in codes[-3]) > 3
    assert codec.encode(torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64)).shape == (0, codec.num_codebooks, 0)
    decoded = codec.decode(codes[-4:-3, :, :100], torch.tensor([100]))
    assert decoded.shape == (1, 100 * frame)
    assert decoded.isfinite().all()
    assert decoded.abs().max() > 0
    for wrong in (-1, codec.codebook_size):
        with pytest.raises(ValueError, match="outside"):
            codec.decode(torch.full((1, codec.num_codebooks, 5), wrong), torch.tensor([5]))
    with pytest.raises(ValueError, match="num_frames"):
        codec.decode(codes[:1], torch.tensor([200]))


def change_nemo(checkpoint, folder, change):
    """Copy a checkpoint with changed weights, and return its name."""
    with tarfile.open(checkpoint) as archive:
        archive.extractall(folder, filter="data")
    change(folder / "model_weights.ckpt")
    with tarfile.open(folder / "changed.nemo", "w") as archive:
        archive.add(folder, ".", filter=lambda info: None if info.name.endswith(".nemo") else info)
    return f"nemo:{folder / 'changed.nemo'}"


def lose_a_weight(path):
    weights = torch.load(path, weights_only=True)
    del weights["audio_encoder.pre_conv.conv.bias"]
    torch.save(weights, path)


def copy_config(checkpoint, folder):
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return f"transformers:{folder}"


def lose_a_tensor(checkpoint, folder):
    weights = safetensors.load_file(checkpoint / "model.safetensors")
    del weights["encoder.conv1.weight"]
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return copy_config(checkpoint, folder)


# Faults of models, and words of the message.
REFUSED = {
    "another frame size": "64 samples",
    "a second codec": "semantic",
    "a speaker encoder": "EncDecSpeakerLabelModel",
    "stereo": "2 channels",
    "chunks": "chunks of 1.0 s",
    "no weights": "cannot load",
    "a lost tensor": "encoder.conv1.weight",
    "a lost weight": "audio_encoder.pre_conv.conv.bias",
    "damaged weights": "weights",
}


def make_bad_model(case, made, folder):
    """Return the name of a model with a fault of ``REFUSED``; ``made`` are the checkpoints."""
    match case:
        case "another frame size":
            return f"nemo:{models.save_nemo_codec(folder / 'c.nemo', models.nemo_codec_config(samples_per_frame=64))}"
        case "a second codec":
            config = models.nemo_codec_config() | {"semantic_codec": models.nemo_codec_config()}
            return f"nemo:{models.save_nemo_codec(folder / 'c.nemo', config)}"
        case "a speaker encoder":
            return f"nemo:{made['nemo_speaker']}"
        case "stereo":
            return f"transformers:{models.save_encodec(folder, audio_channels=2)}"
        case "chunks":
            return f"transformers:{models.save_encodec(folder, chunk_length_s=1.0, overlap=0.01)}"
        case "no weights":
            return copy_config(made["mimi"], folder)
        case "a lost tensor":
            return lose_a_tensor(made["dac"], folder)
        case "a lost weight":
            return change_nemo(made["nemo_codec"], folder, lose_a_weight)
    return change_nemo(made["nemo_codec"], folder, lambda path: path.write_bytes(b"damaged"))


@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_model_is_refused_in_one_line(checkpoints, tmp_path, case):
    name = make_bad_model(case, checkpoints, tmp_path)
    with raises(ConfigError, "bad_model", name, REFUSED[case]):
        load_codec(name)


def encode(codec, *frames):
    """Return codes with different numbers of frames, and these numbers."""
    codes = codec.encode(*models.make_audio([number * codec.samples_per_frame for number in frames]))
    return codes, torch.tensor(frames)


def test_an_item_does_not_depend_on_its_batch(codec):
    codes, num_frames = encode(codec, 40, 3, 0, 25)
    together = codec.decode(codes, num_frames)
    for row, (item, length) in enumerate(zip(codes, num_frames.tolist(), strict=True)):
        alone = codec.decode(item[None, :, :length], torch.tensor([length]))[0]
        assert torch.equal(alone, together[row, : len(alone)])
        assert together[row, len(alone) :].eq(0).all()


def test_a_checkpoint_without_decoder_only_encodes(codecs, checkpoints, tmp_path):
    def drop_decoder(path):
        weights = torch.load(path, weights_only=True)
        torch.save({key: tensor for key, tensor in weights.items() if not key.startswith("audio_decoder.")}, path)

    name = change_nemo(checkpoints["nemo_codec"], tmp_path, drop_decoder)
    codec = load_codec(name)
    codes, num_frames = encode(codec, 20)
    assert torch.equal(codes, encode(codecs["nemo_codec"], 20)[0])
    assert codec.decoded_sampling_rate is None
    with raises(ConfigError, "no_decoder", name):
        codec.decode(codes, num_frames)
