"""Layers with contiguous channels give the results of NeMo's layers, or leave unknown models unchanged."""

import copy
from types import SimpleNamespace

import pytest
import torch
from nemo.collections.asr.models import EncDecSpeakerLabelModel
from nemo.collections.asr.modules import ConvASREncoder, SpeakerDecoder
from nemo.collections.tts.modules.audio_codec_modules import CausalHiFiGANEncoder, HiFiGANEncoder, ResNetEncoder
from support.models import make_audio, save_titanet
from torch import nn

from sharmill.models import load_speaker_encoder
from sharmill.models.cpu_layers import fit_hifigan_to_cpu, fit_titanet_to_cpu
from sharmill.models.nemo_models import quiet_nemo

LAYER = {
    "filters": 24, "repeat": 2, "kernel": [5], "stride": [1], "dilation": [1], "dropout": 0.1, "residual": True,
    "separable": True, "se": True, "se_context_size": -1,
}  # fmt: skip
LENGTHS = torch.tensor([64, 40, 2])


def make_model(layer=(), pool_mode="attention", **options):
    """An encoder with two blocks and a decoder, whose normalization statistics are as after training."""
    options = {"activation": "relu", "feat_in": 20, "conv_mask": True} | options
    first = LAYER | {"repeat": 1, "residual": False, "kernel": [3]}
    torch.manual_seed(0)
    model = SimpleNamespace(
        encoder=ConvASREncoder(jasper=[first, LAYER | dict(layer)], **options).eval(),
        decoder=SpeakerDecoder(feat_in=24, num_classes=3, emb_sizes=12, pool_mode=pool_mode).eval(),
    )
    for part in (model.encoder, model.decoder):
        train_normalization(part)
    return model


def train_normalization(module):
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_mean.normal_(std=0.3)
            norm.running_var.uniform_(0.5, 1.5)
            if norm.affine:
                nn.init.normal_(norm.weight, mean=1.0, std=0.3)
                nn.init.normal_(norm.bias, std=0.3)


@torch.no_grad()
def run(model, features, lengths=LENGTHS):
    """Return the valid frames and the embeddings."""
    encoded, _ = model.encoder(audio_signal=features, length=lengths)
    _, embeddings = model.decoder(encoder_output=encoded, length=lengths)
    there = torch.arange(encoded.shape[2]) < lengths[:, None]
    return encoded.transpose(1, 2)[there], embeddings


@pytest.fixture
def features():
    return torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        ({"stride": [2], "residual": False}, {}),
        ({"heads": 24}, {}),
        ({"se_context_size": 16}, {}),
        ({"residual_dense": True}, {}),
        ({"residual_mode": "max"}, {}),
        ({"future_context": 1}, {}),
        ({"groups": 2, "separable": False}, {}),
        ({}, {"activation": "selu"}),
        ({}, {"conv_mask": False}),
        ({}, {"normalization_mode": "layer"}),
    ],
)
def test_a_model_with_unknown_layers_is_unchanged(features, layer, options):
    model = make_model(layer, **options)
    before = copy.deepcopy(model)
    fit_titanet_to_cpu(model)
    assert type(model.encoder) is ConvASREncoder
    assert type(model.decoder._pooling) is type(before.decoder._pooling)
    for ours, expected in zip(run(model, features), run(before, features), strict=True):
        assert torch.equal(ours, expected)


def test_embeddings_of_a_titanet_equal_nemos(tmp_path):
    checkpoint = save_titanet(tmp_path / "titanet.nemo")
    with quiet_nemo():
        model = EncDecSpeakerLabelModel.restore_from(str(checkpoint), map_location="cpu").eval()
        train_normalization(model)
        model.save_to(str(checkpoint))
    encoder = load_speaker_encoder(f"nemo:{checkpoint}")
    audio, num_samples = make_audio([16000, 47123, 31000])
    with torch.no_grad():
        _, expected = model(input_signal=audio, input_signal_length=num_samples)
    torch.testing.assert_close(encoder.embed(audio, num_samples), nn.functional.normalize(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        ({}, {}),
        ({"kernel": [15]}, {}),
        ({"kernel": [1]}, {}),
        ({"dilation": [2]}, {}),
        ({"separable": False}, {}),
        ({"se": False}, {}),
        ({"residual": False}, {}),
        ({}, {"pool_mode": "xvector"}),
    ],
)
@pytest.mark.parametrize("lengths", [LENGTHS, torch.tensor([64, 64, 64])])
def test_frames_and_embeddings_equal_nemos(features, layer, options, lengths):
    model = make_model(layer, **options)
    faster = copy.deepcopy(model)
    fit_titanet_to_cpu(faster)
    assert type(faster.encoder) is not ConvASREncoder
    assert (type(faster.decoder._pooling) is not type(model.decoder._pooling)) == (not options)
    for ours, expected in zip(run(faster, features, lengths), run(model, features, lengths), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


SAMPLES = torch.tensor([640, 400, 80])


def make_encoder(kind, **options):
    options = {
        "encoded_dim": 6, "down_sample_rates": [2, 5], "base_channels": 4, "in_kernel_size": 7, "out_kernel_size": 3,
        "resblock_kernel_sizes": [3, 7], "resblock_dilation_sizes": [1, 3],
    } | options  # fmt: skip
    torch.manual_seed(0)
    encoder = kind(**options).eval()
    for name, parameter in encoder.named_parameters():
        if name.endswith(("bias", "alpha")):
            nn.init.uniform_(parameter, 0.1, 0.9)
    return encoder


@pytest.fixture
def noise():
    audio = torch.randn(3, 640, generator=torch.Generator().manual_seed(1))
    return audio * (torch.arange(640) < SAMPLES[:, None])


@pytest.mark.parametrize("kind", [CausalHiFiGANEncoder, HiFiGANEncoder])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pad_mode": "zeros"},
        {"pad_mode": "reflect"},
        {"activation": "elu"},
        {"activation": "snake"},
        {"activation": "half_snake"},
        {"resblock_kernel_sizes": [3]},
        {"resblock_kernel_sizes": [1]},
        {"resblock_dilation_sizes": []},
        {"base_channels": 1},
        {"in_kernel_size": 1, "out_kernel_size": 1},
    ],
)
@pytest.mark.parametrize("lengths", [SAMPLES, torch.tensor([640, 640, 640])])
@torch.no_grad()
def test_encoded_frames_equal_nemos(noise, kind, options, lengths):
    encoder = make_encoder(kind, **options)
    faster = fit_hifigan_to_cpu(encoder)
    assert type(faster) is not kind
    given = noise.clone()
    expected, expected_lengths = encoder(audio=noise, audio_len=lengths)
    encoded, encoded_lengths = faster(audio=noise, audio_len=lengths)
    assert torch.equal(noise, given)
    assert torch.equal(encoded_lengths, expected_lengths)
    torch.testing.assert_close(encoded, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(faster(audio=noise, audio_len=lengths)[0], encoded)


def test_an_encoder_with_unknown_layers_is_unchanged():
    for encoder in (make_encoder(HiFiGANEncoder, pad_mode="replicate"), ResNetEncoder(in_channels=4, out_channels=4)):
        assert fit_hifigan_to_cpu(encoder) is encoder
