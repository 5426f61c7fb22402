"""Checkpoints of small models, built once per session, and speech-like audio."""

from __future__ import annotations

import logging

import pytest
import torch
from support import models as dummies

from sharmill.models.nemo_checkpoint import quiet_nemo


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Paths by kind: nemo_speaker, nemo_speaker_unmasked, nemo_codec, nemo_codec_noncausal, encodec, mimi, dac."""

    root = tmp_path_factory.mktemp("checkpoints")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with quiet_nemo():
        return {
            "nemo_speaker": dummies.save_nemo_speaker(root / "speaker.nemo"),
            "nemo_speaker_unmasked": dummies.save_nemo_speaker(root / "unmasked.nemo", masked=False),
            "nemo_codec": dummies.save_nemo_codec(root / "codec.nemo"),
            "nemo_codec_noncausal": dummies.save_nemo_codec(
                root / "noncausal.nemo", dummies.nemo_codec_config(causal=False)
            ),
            "encodec": dummies.save_encodec(root / "encodec"),
            "mimi": dummies.save_mimi(root / "mimi"),
            "dac": dummies.save_dac(root / "dac"),
        }


@pytest.fixture(scope="session")
def model_dummies():
    """The builders themselves, for a test that needs a model of its own."""
    return dummies


@pytest.fixture
def make_audio():
    """Returns a function: lengths in samples -> (batch, longest) voiced-like float32 audio, zero beyond each item."""

    def make(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        audio = torch.zeros(len(lengths), max(lengths))
        for item, length in enumerate(lengths):
            time = torch.arange(length) / 16000
            tone = torch.sin(2 * torch.pi * (110 + 40 * item) * time) * torch.sin(2 * torch.pi * 3 * time)
            audio[item, :length] = 0.2 * tone + 0.05 * torch.randn(length, generator=generator)
        return audio, torch.tensor(lengths)

    return make
