"""Memory of decoded samples is used again, and never while anything refers to it."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
from lhotse import Recording
from lhotse.audio import AudioSource

from sharmill.audio.encoding import encode
from sharmill.shar.reading.decoding import _decode_recording, _DecodedSource
from sharmill.shar.reading.sample_buffers import SampleBuffers

RATE = 16000
TONE = np.sin(np.arange(3 * RATE) / 20).astype(np.float32)[None] / 2


@pytest.fixture(autouse=True)
def buffers(monkeypatch):
    monkeypatch.setattr(_DecodedSource, "buffers", SampleBuffers())
    return _DecodedSource.buffers


def decoded(samples=TONE, audio_format="flac"):
    data = encode(samples[0], RATE, audio_format)
    source = AudioSource("memory", [0], data)
    count = samples.shape[1]
    return _decode_recording(Recording("r", [source], RATE, count, count / RATE)).sources[0]


def address(samples):
    return samples.__array_interface__["data"][0]


def test_the_buffer_of_a_source_that_is_gone_is_used_again():
    source = decoded()
    where = address(source.samples)
    loaded = source.load_audio()
    del source
    other = decoded(-TONE)
    assert address(other.samples) == where
    np.testing.assert_allclose(loaded, TONE, atol=1e-4)
    np.testing.assert_allclose(other.load_audio(), -TONE, atol=1e-4)


@pytest.mark.parametrize(
    "hold",
    [
        lambda source: source.samples,
        lambda source: source.samples[:, 100:],
        lambda source: source.samples.base,
        copy.copy,
    ],
)
def test_a_buffer_that_something_refers_to_is_left_alone(hold):
    source = decoded()
    held, where = hold(source), address(source.samples)
    samples = held.samples if isinstance(held, _DecodedSource) else held
    before = samples.copy()
    del source
    other = decoded(-TONE)
    assert address(other.samples) != where
    np.testing.assert_array_equal(samples, before)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda source: pickle.loads(pickle.dumps(source))])
def test_samples_of_another_origin_are_no_buffers(buffers, again):
    source = decoded()
    other = again(source)
    np.testing.assert_array_equal(other.load_audio(), source.load_audio())
    del other
    gc.collect()
    assert not any(buffers._free.values())
    del source
    assert sum(map(len, buffers._free.values())) == 1


def test_of_files_that_were_decoded_without_a_buffer_nothing_is_kept(buffers):
    """Each has a size of its own, which no other file asks for."""
    for count in range(20000, 20010):
        np.testing.assert_allclose(decoded(TONE[:, :count], "wav").load_audio(), TONE[:, :count], atol=1e-4)
    assert not any(buffers._free.values())


def test_what_is_kept_is_bounded(buffers):
    held = [buffers.take(100, 1) for _ in range(40)]
    for samples in held:
        buffers.give_back({"samples": samples}, "samples")
    assert not any(buffers._free.values())
    for index in range(40):
        held[index] = samples = None
        buffers.give_back({"samples": buffers.take(100, 1)}, "samples")
        assert sum(map(len, buffers._free.values())) == 1
    owners = [{"samples": buffers.take(100, 1)} for _ in range(40)]
    for owner in owners:
        buffers.give_back(owner, "samples")
    assert sum(map(len, buffers._free.values())) == 32
    buffers.give_back({"samples": buffers.take(1 << 25, 1)}, "samples")
    assert sum(map(len, buffers._free.values())) == 32
