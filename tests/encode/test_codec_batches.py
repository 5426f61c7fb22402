"""Batches for a codec: the memory that they are put together in, and their padding."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile as sf
import torch
from support.shar import ToyCodec, voice

from sharmill.encode.codec_batches import CodecBatches
from sharmill.models.pieces import Pieces
from sharmill.models.shapes import Padding
from sharmill.shar.items import Item


def make_item(seconds):
    stream = io.BytesIO()
    samples = voice(seconds)
    sf.write(stream, samples, 16000, format="FLAC")
    metadata = {"num_samples": len(samples), "sampling_rate": 16000}
    return Item(f"{seconds}", "flac", stream.getvalue(), metadata), samples


@pytest.fixture
def pinned(monkeypatch):
    """Whether each batch was asked for in pinned memory, of which there is none without a GPU."""
    asked = []
    zeros = torch.zeros

    def zeros_anywhere(*shape, pin_memory=None, **options):
        if pin_memory is not None:
            asked.append(pin_memory)
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", zeros_anywhere)
    # That measures the memory of a GPU.
    monkeypatch.setattr("sharmill.encode.codec_batches.require_room", lambda *arguments: float("inf"))
    return asked


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_are_put_together_in_pinned_memory_where_the_codec_is_on_a_gpu(pinned, device):
    """The longest item is cut into three pieces, which share a batch."""
    pieces = Pieces(length=50, before=0, after=0)
    codec = ToyCodec()
    batches = CodecBatches(codec, batch_seconds=3.0, device=device, pieces=pieces, threads=1)
    items, samples = zip(*map(make_item, [0.5, 3.0, 1.0]), strict=True)
    found = batches.finish(batches.begin(items), lambda frames: None, Padding(), lambda: None)
    assert pinned == [device == "cuda"] * 2
    assert codec.batches == [[16000] * 3, [16000, 8000]]
    for codes, audio in zip(found, samples, strict=True):
        np.testing.assert_array_equal(codes, codec.codes(audio))


def test_rows_of_silence_count_as_padding(pinned):
    """On a GPU, canonical batches have as many rows as fit in one."""
    batches = CodecBatches(ToyCodec(), batch_seconds=3.0, device="cuda", canonical=True, threads=1)
    padding = Padding()
    batches.finish(batches.begin([make_item(1.0)[0]]), lambda frames: None, padding, lambda: None)
    assert padding == Padding(seconds=1.0, padded=3.0)
