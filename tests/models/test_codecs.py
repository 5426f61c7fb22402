"""Codecs loaded from real checkpoints, against the models themselves."""

from __future__ import annotations

import dataclasses
import tarfile

import pytest
import torch
from support import models
from support.errors import raises
from support.models import make_audio

from sharmill.errors import ConfigError, FatalError, UnitFailed
from sharmill.models import Codec, load_codec
from sharmill.models.nemo_checkpoint import quiet_nemo

KINDS = {
    "nemo_codec": "nemo",
    "nemo_codec_noncausal": "nemo",
    "encodec": "transformers",
    "mimi": "transformers",
    "dac": "transformers",
}
# A tie between two codes is decided by the last bit, which the shape of a batch can change.
MIN_AGREEMENT = 0.998


@pytest.fixture(scope="module")
def codecs(checkpoints):
    return {kind: load_codec(f"{backend}:{checkpoints[kind]}") for kind, backend in KINDS.items()}


@pytest.fixture(params=KINDS)
def codec(request, codecs):
    return codecs[request.param]


def agreement(codec, audio, num_samples) -> float:
    """Share of codes that are the same for items encoded together and alone."""
    together = codec.encode(audio, num_samples)
    same = total = 0
    for item, length in enumerate(num_samples):
        alone = codec.encode(audio[item : item + 1, :length], num_samples[item : item + 1])[0]
        same += int((alone == together[item, :, : alone.shape[1]]).sum())
        total += alone.numel()
    return same / total


@pytest.mark.parametrize(
    ("kind", "samples_per_frame", "num_codebooks", "codebook_size", "equal_lengths_only"),
    [
        ("nemo_codec", 32, 3, 60, False),
        ("nemo_codec_noncausal", 32, 3, 60, True),
        ("encodec", 32, 8, 64, False),
        ("mimi", 64, 4, 64, False),
        ("dac", 32, 3, 64, True),
    ],
)
def test_attributes_come_from_the_model(
    codecs, kind, samples_per_frame, num_codebooks, codebook_size, equal_lengths_only
):
    codec = codecs[kind]
    assert isinstance(codec, Codec)
    assert codec.sampling_rate == 16000
    assert codec.trained
    assert codec.samples_per_frame == samples_per_frame
    assert (codec.num_codebooks, codec.codebook_size) == (num_codebooks, codebook_size)
    assert codec.equal_lengths_only == equal_lengths_only
    assert len(codec.checksum) == 16


def test_frames_are_the_ceiling_around_every_multiple(codec):
    lengths = [frames * codec.samples_per_frame + more for frames in (1, 2, 3, 8, 50) for more in (-1, 0, 1)]
    for length in lengths:
        codes = codec.encode(*make_audio([length]))
        assert codes.shape == (1, codec.num_codebooks, -(-length // codec.samples_per_frame))
        assert codes.dtype == torch.int64


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
    audio, num_samples = make_audio([lengths[i] for i in (4, 9, 0, 7, 2, 5, 1, 8, 3, 6)])
    share = agreement(codec, audio, num_samples)
    print(f"{codec.spec.name}: {share:.4%} of the codes agree")
    assert share >= MIN_AGREEMENT


@pytest.mark.parametrize(
    ("kind", "unguarded"),
    [
        ("nemo_codec_noncausal", {"equal_lengths_only": False}),
        ("dac", {"equal_lengths_only": False}),
        ("encodec", {"min_frames_in_batch": 0}),
    ],
)
def test_the_guard_against_padding_is_needed(codecs, kind, unguarded):
    codec = codecs[kind]
    loose = type(codec).__new__(type(codec))
    loose.__dict__.update(codec.__dict__ | unguarded, spec=dataclasses.replace(codec.spec, **unguarded))
    frame = codec.samples_per_frame
    audio, num_samples = make_audio([frame, 2 * frame, 3 * frame, 5 * frame, 9 * frame])
    assert agreement(loose, audio, num_samples) < 0.95


def test_codes_beyond_an_item_are_zero_and_audio_beyond_it_is_ignored(codec):
    frame = codec.samples_per_frame
    audio, num_samples = make_audio([10 * frame, 3 * frame - 5])
    codes = codec.encode(audio, num_samples)
    assert codes[1, :, 3:].eq(0).all()
    audio[1, 3 * frame - 5 :] = 0.7
    assert torch.equal(codec.encode(audio, num_samples), codes)


def test_an_item_without_samples_has_no_frames(codec):
    audio, num_samples = make_audio([5 * codec.samples_per_frame, 0])
    assert torch.equal(codec.encode(audio, num_samples)[:1], codec.encode(audio[:1], num_samples[:1]))
    assert codec.encode(torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64)).shape == (0, codec.num_codebooks, 0)


def test_codes_are_not_all_the_same(codec):
    codes = codec.encode(*make_audio([100 * codec.samples_per_frame]))[0]
    assert min(row.unique().numel() for row in codes) > 3


@pytest.mark.parametrize("kind", ["nemo_codec", "nemo_codec_noncausal"])
def test_nemo_codes_are_those_of_the_model(codecs, checkpoints, kind):
    from nemo.collections.tts.models import AudioCodecModel

    with quiet_nemo():
        model = AudioCodecModel.restore_from(str(checkpoints[kind]), map_location="cpu").eval()
    for length in (32 * 40 - 1, 32 * 40, 32 * 40 + 1):
        audio, num_samples = make_audio([length])
        with torch.inference_mode():
            expected, _ = model.encode(audio=audio, audio_len=num_samples)
        assert torch.equal(codecs[kind].encode(audio, num_samples), expected.long())


@pytest.mark.parametrize("kind", ["encodec", "mimi", "dac"])
def test_transformers_codes_are_those_of_the_model(codecs, checkpoints, kind):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoints[kind]).eval()
    audio, num_samples = make_audio([64 * 40])
    with torch.inference_mode():
        if kind == "encodec":
            expected = model.encode(audio[:, None], bandwidth=24.0).audio_codes[0]
        else:
            expected = model.encode(audio[:, None]).audio_codes
    assert torch.equal(codecs[kind].encode(audio, num_samples), expected)


def test_the_checksum_is_of_the_weights(codecs, checkpoints, tmp_path):
    again = load_codec(f"nemo:{checkpoints['nemo_codec']}")
    assert again.checksum == codecs["nemo_codec"].checksum
    other = models.nemo_codec_config()
    other["audio_encoder"]["in_kernel_size"] = 5
    path = models.save_nemo_codec(tmp_path / "other.nemo", other)
    assert load_codec(f"nemo:{path}").checksum != again.checksum


def test_loading_leaves_the_random_state_alone(checkpoints):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for kind, backend in KINDS.items():
        load_codec(f"{backend}:{checkpoints[kind]}")
    assert torch.equal(torch.get_rng_state(), before)


def test_indices_outside_the_codebook_fail_their_unit(checkpoints):
    codec = load_codec(f"nemo:{checkpoints['nemo_codec']}")
    codec.codebook_size = 5
    with raises(UnitFailed, "bad_codes", "5"):
        codec.encode(*make_audio([3200]))


def test_another_number_of_frames_is_fatal(checkpoints):
    codec = load_codec(f"nemo:{checkpoints['nemo_codec']}")
    codec.samples_per_frame = 64
    with raises(FatalError, "bad_codes", "(1, 3, 20)", "(1, 3, 10)"):
        codec.encode(*make_audio([640]))


def test_a_model_that_claims_another_frame_size_is_refused(tmp_path):
    path = models.save_nemo_codec(tmp_path / "codec.nemo", models.nemo_codec_config(samples_per_frame=64))
    with raises(ConfigError, "bad_model", str(path)):
        load_codec(f"nemo:{path}")


def test_a_second_semantic_codec_is_refused(tmp_path):
    config = models.nemo_codec_config()
    config["semantic_codec"] = models.nemo_codec_config()
    path = models.save_nemo_codec(tmp_path / "codec.nemo", config)
    with raises(ConfigError, "bad_model", str(path), "semantic"):
        load_codec(f"nemo:{path}")


def lose_a_weight(path):
    weights = torch.load(path, weights_only=True)
    del weights["audio_encoder.pre_conv.conv.bias"]
    torch.save(weights, path)


@pytest.mark.parametrize(
    ("damage", "shown"),
    [(lose_a_weight, "audio_encoder.pre_conv.conv.bias"), (lambda path: path.write_bytes(b"damaged"), "weights")],
)
def test_a_nemo_checkpoint_with_damaged_weights_is_one_line(checkpoints, tmp_path, damage, shown):
    unpacked, path = tmp_path / "unpacked", tmp_path / "codec.nemo"
    with tarfile.open(checkpoints["nemo_codec"]) as archive:
        archive.extractall(unpacked, filter="data")
    damage(unpacked / "model_weights.ckpt")
    with tarfile.open(path, "w") as archive:
        archive.add(unpacked, ".")
    with raises(ConfigError, "bad_model", str(path), shown) as raised:
        load_codec(f"nemo:{path}")
    assert "\n" not in str(raised.value)


def test_a_speaker_encoder_is_no_codec(checkpoints):
    with raises(ConfigError, "bad_model", "EncDecSpeakerLabelModel", "AudioCodecModel"):
        load_codec(f"nemo:{checkpoints['nemo_speaker']}")


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"audio_channels": 2}, "2 channels"),
        ({"chunk_length_s": 1.0, "overlap": 0.01}, "chunks of 1.0 s"),
    ],
)
def test_an_encodec_for_stereo_or_chunks_is_refused(tmp_path, changes, shown):
    path = models.save_encodec(tmp_path / "encodec", **changes)
    with raises(ConfigError, "bad_model", str(path), shown):
        load_codec(f"transformers:{path}")


@pytest.mark.parametrize("changes", [{"use_causal_conv": False}, {"normalize": True}, {"norm_type": "time_group_norm"}])
def test_an_encodec_that_sees_all_of_its_input_wants_equal_lengths(tmp_path, changes):
    codec = load_codec(f"transformers:{models.save_encodec(tmp_path / 'encodec', **changes)}")
    assert codec.equal_lengths_only
    assert agreement(codec, *make_audio([32, 70, 96, 400, 3200])) >= MIN_AGREEMENT


def test_a_directory_without_weights_is_refused(checkpoints, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoints["mimi"] / "config.json").read_bytes())
    with raises(ConfigError, "bad_model", f"transformers:{tmp_path}"):
        load_codec(f"transformers:{tmp_path}")


def test_a_directory_that_lacks_weights_is_refused(checkpoints, tmp_path):
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_bytes((checkpoints["dac"] / "config.json").read_bytes())
    weights = load_file(checkpoints["dac"] / "model.safetensors")
    del weights["encoder.conv1.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises(ConfigError, "bad_model", "1", "encoder.conv1.weight"):
        load_codec(f"transformers:{tmp_path}")
