"""The codecs in examples/codecs/, on small models of the real classes."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from support.models import make_audio
from support.paths import REPOSITORY

from sharmill.models import load_codec

SNAC = {
    "sampling_rate": 16000, "encoder_dim": 16, "encoder_rates": [4, 8], "decoder_dim": 16, "decoder_rates": [8, 4],
    "codebook_size": 64, "codebook_dim": 4, "vq_strides": [4, 2, 1],
}  # fmt: skip


@pytest.fixture
def codec_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples" / "codecs"))
    yield
    sys.modules.pop("snac_codec", None)


@pytest.mark.parametrize("window", [None, 32])
def test_snacs_levels_become_rows_in_the_order_of_time(tmp_path, codec_folder, window):
    snac = pytest.importorskip("snac", reason="the package snac is not installed: pip install 'sharmill[test]'")
    config = SNAC | {"attn_window_size": window}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = snac.SNAC(**config).eval()
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    codec = load_codec(f"python:snac_codec:SnacCodec:{tmp_path}")
    assert (codec.samples_per_frame, codec.num_codebooks, codec.codebook_size) == (4 * 32, 1 + 2 + 4, 64)
    audio, num_samples = make_audio([16000, 16000, 9001])
    codes = codec.encode(audio, num_samples)
    assert codes.shape == (3, 7, 125)
    with torch.inference_mode():
        levels = model.encode(audio[:2, None])
    for row, (level, start, step) in enumerate([(0, 0, 1), (1, 0, 2), (1, 1, 2), *((2, n, 4) for n in range(4))]):
        expected = levels[level][:2, start::step][:, :125]
        assert float((codes[:2, row] == expected).float().mean()) > 0.99
