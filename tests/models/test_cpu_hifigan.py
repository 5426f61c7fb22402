"""The encoder with the channels side by side computes what NeMo's own does, or NeMo's own is left."""

from __future__ import annotations

import pytest
import torch
from nemo.collections.tts.modules.audio_codec_modules import CausalHiFiGANEncoder, HiFiGANEncoder, ResNetEncoder
from torch import nn

from sharmill.models.cpu_hifigan import fit_hifigan_to_cpu

LENGTHS = torch.tensor([640, 400, 80])


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
def audio():
    audio = torch.randn(3, 640, generator=torch.Generator().manual_seed(1))
    return audio * (torch.arange(640) < LENGTHS[:, None])


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
@pytest.mark.parametrize("lengths", [LENGTHS, torch.tensor([640, 640, 640])])
@torch.no_grad()
def test_encoded_frames_are_nemos_own(audio, kind, options, lengths):
    encoder = make_encoder(kind, **options)
    faster = fit_hifigan_to_cpu(encoder)
    assert type(faster) is not kind
    given = audio.clone()
    expected, expected_lengths = encoder(audio=audio, audio_len=lengths)
    encoded, encoded_lengths = faster(audio=audio, audio_len=lengths)
    assert torch.equal(audio, given)
    assert torch.equal(encoded_lengths, expected_lengths)
    torch.testing.assert_close(encoded, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(faster(audio=audio, audio_len=lengths)[0], encoded)


@torch.no_grad()
def test_samples_that_fill_no_frame_are_padded_as_nemo_does(audio):
    encoder = make_encoder(CausalHiFiGANEncoder)
    lengths = torch.tensor([633, 400, 77])
    expected, _ = encoder(audio=audio[:, :633], audio_len=lengths)
    encoded, _ = fit_hifigan_to_cpu(encoder)(audio=audio[:, :633], audio_len=lengths)
    torch.testing.assert_close(encoded, expected, atol=1e-5, rtol=1e-4)


def test_an_encoder_with_other_layers_stays_as_it_is():
    for encoder in (make_encoder(HiFiGANEncoder, pad_mode="replicate"), ResNetEncoder(in_channels=4, out_channels=4)):
        assert fit_hifigan_to_cpu(encoder) is encoder


@torch.no_grad()
def test_bfloat16_is_as_near_as_nemos_own(audio):
    encoder = make_encoder(CausalHiFiGANEncoder)
    faster = fit_hifigan_to_cpu(encoder)
    exact, _ = encoder(audio=audio, audio_len=LENGTHS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, _ = encoder(audio=audio, audio_len=LENGTHS)
        ours, _ = faster(audio=audio, audio_len=LENGTHS)
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()
