"""Layers with the channels side by side compute what NeMo's own do, or leave the model as it is."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from nemo.collections.asr.models import EncDecSpeakerLabelModel
from nemo.collections.asr.modules import ConvASREncoder, SpeakerDecoder
from nemo.collections.asr.parts.submodules.tdnn_attention import AttentivePoolLayer
from support.models import make_audio, save_titanet
from torch import nn

from sharmill.models import load_speaker_encoder
from sharmill.models.cpu_titanet import fit_titanet_to_cpu
from sharmill.models.nemo_checkpoint import quiet_nemo

LAYER = {
    "filters": 24, "repeat": 2, "kernel": [5], "stride": [1], "dilation": [1], "dropout": 0.1, "residual": True,
    "separable": True, "se": True, "se_context_size": -1,
}  # fmt: skip
LENGTHS = torch.tensor([64, 40, 2])


def make_model(layer=(), pool_mode="attention", **options):
    """An encoder of two blocks and a decoder, whose normalization does something, as after training."""
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
    """Return the frames that are no padding, and the embeddings."""
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
def test_frames_and_embeddings_are_nemos_own(features, layer, options, lengths):
    model = make_model(layer, **options)
    faster = copy.deepcopy(model)
    fit_titanet_to_cpu(faster)
    assert type(faster.encoder) is not ConvASREncoder
    assert (type(faster.decoder._pooling) is not type(model.decoder._pooling)) == (not options)
    for ours, expected in zip(run(faster, features, lengths), run(model, features, lengths), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


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
def test_a_model_with_other_layers_stays_as_it_is(features, layer, options):
    model = make_model(layer, **options)
    before = copy.deepcopy(model)
    fit_titanet_to_cpu(model)
    assert type(model.encoder) is ConvASREncoder
    assert type(model.decoder._pooling) is type(before.decoder._pooling)
    for ours, expected in zip(run(model, features), run(before, features), strict=True):
        assert torch.equal(ours, expected)


def test_a_pooling_with_other_layers_stays_as_it_is():
    model = make_model()
    model.decoder._pooling = pooling = AttentivePoolLayer(24, kernel_size=3)
    fit_titanet_to_cpu(model)
    assert model.decoder._pooling is pooling


def test_the_input_is_left_as_it_is_and_results_repeat(features):
    model = make_model()
    fit_titanet_to_cpu(model)
    given = features.clone()
    first = run(model, features)
    assert torch.equal(features, given)
    for again, once in zip(run(model, features), first, strict=True):
        assert torch.equal(again, once)


def test_bfloat16_is_as_near_as_nemos_own(features):
    model = make_model()
    faster = copy.deepcopy(model)
    fit_titanet_to_cpu(faster)
    _, exact = run(model, features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (_, theirs), (_, ours) = run(model, features), run(faster, features)
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_embeddings_of_a_titanet_are_nemos_own(tmp_path):
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
