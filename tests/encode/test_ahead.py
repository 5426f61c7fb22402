"""Encode feeds a codec across units: the next unit is decoded while one is at work, and nothing else changes."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from support.shar import ToyCodec, codec_stages, loading, run, voice

from sharmill.encode import codec_batches
from sharmill.errors import UnitFailed
from sharmill.shar import open_shar

SECONDS = [1.0, 0.9, 0.8, 0.7]


@pytest.fixture
def config(project):
    """Four cuts of one unit each."""
    for number, seconds in enumerate(SECONDS):
        project.add(f"{number}.flac", voice(seconds, pitch=150 + 30 * number, seed=number), number=number)
    config = project.write([1, 0, 0, 0], write={"shard_size": 2, "order": "manifest"})
    return dataclasses.replace(config, encode=dataclasses.replace(config.encode, unit_seconds=0.8))


@pytest.fixture
def decoded(monkeypatch):
    """By the length of what is decoded, an event."""
    events = {round(seconds * 16000): threading.Event() for seconds in SECONDS}
    load = codec_batches._load

    def load_and_tell(item, rate):
        samples = load(item, rate)
        events[len(samples)].set()
        return samples

    monkeypatch.setattr(codec_batches, "_load", load_and_tell)
    return events


def encode(config, codec):
    with loading(codec):
        survey, stage, assemble = codec_stages(config, "toy")
        assert run(survey).ok
        result = run(stage)
        if result.ok:
            assert run(assemble).ok
    return result


class Waiting(ToyCodec):
    """A codec that is not done with a unit until the next is being decoded."""

    def __init__(self, decoded):
        super().__init__()
        self.decoded = decoded
        self.waited_for = []

    def encode(self, audio, num_samples):
        shorter = [length for length in self.decoded if length < int(num_samples.max())]
        if shorter:
            self.waited_for.append(max(shorter))
            assert self.decoded[max(shorter)].wait(60), "the next unit is not decoded before this one ends"
        return super().encode(audio, num_samples)


def test_the_next_unit_is_decoded_before_one_ends_and_the_codes_are_the_same(project, config, decoded):
    codec = Waiting(decoded)
    assert encode(config, codec).ok
    assert codec.waited_for == [14400, 12800, 11200]
    for cut in open_shar(project.dataset):
        samples = cut.load_custom("target_audio")[0]
        np.testing.assert_array_equal(cut.target_codes.load(), codec.codes(samples))


def test_a_unit_that_cannot_be_decoded_costs_no_other(config, monkeypatch):
    load = codec_batches._load

    def fail_at_one(item, rate):
        if item.metadata["num_samples"] == 14400:
            raise UnitFailed("cannot be decoded", code="damaged_shard")
        return load(item, rate)

    monkeypatch.setattr(codec_batches, "_load", fail_at_one)
    codec = ToyCodec()
    result = encode(config, codec)
    assert [failure.message for failure in result.failures.values()] == ["UnitFailed: cannot be decoded"]
    assert sorted(codec.batches) == [[11200], [12800], [16000]]
